"""Steps of a model whose parts are planned one by one, all within one budget.

What runs between the parts stays eager: it is measured in a first step, in which every part runs
the plan that holds least. Then each kind of part has the plan that makes the whole step cheapest
within the budget. A part that was not foreseen is judged by what is held when it starts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tightfit.allocator.resident import granularity_of
from tightfit.capture.calls.signature import flatten
from tightfit.capture.captured import Captured, placeholder_tensors
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.execution.guard import Guard, StepPeaks
from tightfit.execution.runtime import Run
from tightfit.graph.fingerprint import fingerprint
from tightfit.plan.plan import Plan
from tightfit.session.memory.account import new_gradient_bytes
from tightfit.session.memory.budget import usable_bytes
from tightfit.session.options import Options
from tightfit.session.parts.choice import Choice, ToldChoice, choose
from tightfit.session.parts.history import Level, Levels, Turns
from tightfit.session.parts.kinds import Call, Kind, Kinds, Part
from tightfit.session.parts.ledger import Holding, Ledger, Recorder
from tightfit.session.parts.ledger_edits import Further, as_called, with_calls
from tightfit.session.processes import agreed
from tightfit.session.report import Report
from tightfit.units import format_bytes

__all__ = ["Steps"]

_ALIKE = 0.005  # of the budget: what two steps may differ by at their begin and still be alike
_ADVICE = "Raise the budget, or make what lies between the parts smaller"


class Steps:
    """Runs the parts of a model by their plans.

    Parameters
    ----------
    name : str
        Of the model, for messages.
    options : Options
        The user's.
    device : str
        What the model lies on.
    constants : callable
        Returns the bytes held at the begin of a step.
    capture : callable
        Given a call and a name, returns the captured step of a part.
    coming : callable
        Returns the bytes that will stay once they exist: the optimizer's state.
    late_bytes : int
        Of the budget, what plans leave unused for memory that other threads free in their own time.
    wanted : str
        What a user who is short of memory may do besides.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        device: str,
        constants: Callable[[], int],
        capture: Callable[[TracedCall, str], Captured],
        *,
        coming: Callable[[], int] = lambda: 0,
        late_bytes: int = 0,
        wanted: str = "make the batch smaller",
    ) -> None:
        self.name = name
        self.options = options
        self.late_bytes = late_bytes
        self.guard = Guard(self.limit_bytes, device, options.on_exceed, constants, _ADVICE)
        self.granularity = granularity_of(device)
        self.kinds = Kinds(capture)
        self.latest: dict[Part, Kind] = {}
        self.called: set[Part] = set()
        self.open: weakref.WeakSet[Run] = weakref.WeakSet()
        self.recorder: Recorder | None = None
        self._coming = coming
        self._wanted = wanted
        self._levels = Levels()
        self._level = Level(None, 0)
        self._turns = Turns()
        self._further: dict[Part, Further[Kind]] = {}
        self._coming_bytes = 0
        self._choices_made: Counter[Any] = Counter()
        self._last: tuple[Ledger[Kind], int] | None = None

    @property
    def limit_bytes(self) -> int:
        """What a step may hold."""
        assert self.options.budget_bytes is not None
        return usable_bytes(self.options.budget_bytes, self.options.reserve_bytes)

    @property
    def _alike_bytes(self) -> int:
        return max(round(_ALIKE * self.limit_bytes), self.late_bytes)

    def change_budget(self, options: Options) -> None:
        """Plan the next step within another budget; what was captured stays."""
        self.options = options
        self.guard.budget_bytes = self.limit_bytes
        self._levels = Levels()

    # -- steps --------------------------------------------------------------------------------

    def begin(self, signature: Any, absent: Mapping[Part, Kind] = MappingProxyType({})) -> None:
        """Begin a step, unless one is under way.

        Parameters
        ----------
        signature : hashable
            Of the model's inputs.
        absent : mapping of Part to Kind
            Parts that have not run yet and may, and what they are taken to be like.
        """
        if any(run.is_open for run in self.open):
            return
        self.close()
        self.kinds.settle_outputs()
        self.guard.before_forward()
        self._coming_bytes = self._coming()
        held = self.guard.held_bytes() + self._coming_bytes
        self._level = level = self._levels.of(signature, held, self._alike_bytes)
        self._further = {}
        if level.ledger is not None:
            left = self.limit_bytes - held - self.late_bytes
            self._further = self._may_run(level.ledger, absent)
            order = self._turns.order(absent)
            self._plan(level, with_calls(level.ledger, self._further, order), left)
            assert level.choice is not None
            level.planned_bytes = held + level.planned.peak_of(level.choice.calls)
        self.called = set()
        self.recorder = Recorder(self.guard)

    def close(self) -> StepPeaks | None:
        """End the step under way; return what it held.

        Raises
        ------
        BudgetExceeded
            If that was more than the budget, and the user asked to raise.
        """
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return self.guard.close()
        is_complete = recorder.is_complete
        ledger = recorder.close()
        if is_complete:
            begin_bytes = self.guard.held_bytes() - self.guard.live_bytes()
            self._last = ledger, self._planned_bytes(ledger, begin_bytes)
            self._level.ledger = ledger
            self._turns.note(ledger.parts)
        return self.guard.close(_where(ledger))

    def _planned_bytes(self, ledger: Ledger[Kind], begin_bytes: int) -> int:
        """Return the peak that was foreseen for a step, the parts taken that have run in it."""
        before = self._level.ledger
        if before is None:
            return begin_bytes + max(ledger.peak_with({}), ledger.beside_bytes)
        likely = as_called(before, ledger, self._further)
        if likely is None:
            return self._level.planned_bytes
        return begin_bytes + max(likely.peak_of(ledger.holdings), likely.beside_bytes)

    def abandon(self) -> None:
        """Forget the step under way: it has failed."""
        self.recorder = None
        self.guard.abandon()

    def report(self) -> Report:
        """Return what the plans promise and what the last complete step held.

        Raises
        ------
        BadInput
            If no step has been taken yet.
        """
        self.close()
        if self._last is None:
            raise BadInput(
                f"{self.name} is planned part by part while it first runs: take one step, forward "
                "and backward"
            )
        ledger, planned_bytes = self._last
        step = self.guard.steps[-1]
        cost_s = sum(holding.cost_s for holding in ledger.holdings)
        least_s = sum(holding.baseline_cost_s for holding in ledger.holdings)
        overhead = cost_s / least_s - 1 if least_s > 0 else 0.0
        return Report(
            budget_bytes=self.limit_bytes,
            constant_bytes=step.constant_bytes,
            planned_peak_bytes=planned_bytes,
            overhead=overhead,
            bound=0.0,
            gap=overhead,
            status="feasible",
            cost_source=next((kind.captured.graph.cost_source for kind in ledger.calls), "none"),
            measured=step,
            plan=None,
            plans=_plans_in_use(ledger),
            calls=len(ledger.calls),
        )

    def least_bytes(self) -> int:
        """Return what a step like the last complete one holds with the least plan of every part.

        Raises
        ------
        BadInput
            If no step has been taken yet.
        """
        held = self.report().constant_bytes
        assert self._last is not None
        ledger = self._last[0]
        beside = (mark.peak_bytes for mark in ledger.marks if not mark.open and mark.call < 0)
        least = {kind: kind.least for kind in ledger.calls}
        return held + max(ledger.peak_with(least), max(beside, default=0))

    # -- plans --------------------------------------------------------------------------------

    def _plan(self, level: Level, worst: Ledger[Kind], left_bytes: int) -> None:
        """Make sure that there are plans for a step of such calls, the worst that may come.

        Those at hand stay as long as they fit at all: what is late is measured now here, now there,
        and all ranks are to run the same.
        """
        choice, most_bytes = level.choice, left_bytes + self.late_bytes
        if worst.beside_bytes > most_bytes:
            raise self._infeasible(worst)
        known = choice is not None and all(kind in choice.kinds for kind in worst.calls)
        if choice is None or not known or worst.peak_with(choice.kinds) > most_bytes:
            level.choice = self._choose(level, worst, left_bytes)
            self.guard.restart()
        elif level.planned.calls != worst.calls or worst.peak_of(choice.calls) > most_bytes:
            alone = self.options.ranks is None  # ranks decide together, with new plans only
            level.choice = choice.spread(worst, left_bytes if alone else 0)
        level.planned = worst

    def _choose(self, level: Level, ledger: Ledger[Kind], left_bytes: int) -> Choice:
        """Return the plans of a step's calls: those another rank chose, if they fit."""
        graphs = [fingerprint(kind.captured.graph) for kind in ledger.calls]
        number = self._choices_made[level.signature]
        self._choices_made[level.signature] += 1
        own: Choice | None = None

        def make() -> ToldChoice:
            nonlocal own
            own = choose(ledger, left_bytes, self.options)
            return ToldChoice.of(own, ledger)

        told = agreed(self.options.ranks, f"parts {number} {graphs}", ToldChoice, make)
        found = own or told.choice(ledger)
        if found is not None and ledger.peak_of(found.calls) > left_bytes + self.late_bytes:
            found = choose(ledger, left_bytes, self.options)
        if found is None:
            raise self._infeasible(ledger)
        return found

    def _infeasible(self, ledger: Ledger[Kind]) -> InfeasibleBudget:
        held = self.guard.held_bytes() + self._coming_bytes
        least = ledger.peak_with({kind: kind.least for kind in ledger.calls})
        needed = held + max(least, ledger.beside_bytes)
        return InfeasibleBudget(
            f"no plans were found for the {len(ledger.calls)} parts of {self.name} within "
            f"{format_bytes(self.limit_bytes)}: {format_bytes(held)} are held between steps, and "
            f"with plans that save least a step holds {format_bytes(needed)}. Raise the budget to "
            f"that, or {self._wanted}",
            budget_bytes=self.limit_bytes,
            minimum_bytes=needed,
        )

    def _may_run(
        self, ledger: Ledger[Kind], absent: Mapping[Part, Kind]
    ) -> dict[Part, Further[Kind]]:
        """Return the calls of parts that a step did not have and may have, with least plans."""
        away = {part: kind for part, kind in self.latest.items() if part not in ledger.parts}
        return {
            part: Further(kind, kind.least, new_gradient_bytes(part.modules, self.granularity))
            for part, kind in (away | dict(absent)).items()
        }

    def _holding_for(self, part: Part, kind: Kind) -> Holding:
        """Return by which plan a part runs: the chosen one, or its least where little is left."""
        assert self.recorder is not None
        level = self._level
        planned = level.foreseen(part, kind)
        chosen = planned or (level.choice.kinds.get(kind) if level.choice else None) or kind.least
        if self.options.ranks is not None:
            return chosen  # ranks decide together, between steps
        left = self.limit_bytes - self._coming_bytes - self.guard.held_bytes()
        for holding in (chosen, kind.least):
            fits = holding.needed_bytes <= left
            if fits and (holding is planned or holding is kind.least):
                return holding
            if fits and holding.staying_bytes + self._following_bytes(part) <= left:
                return holding
        needed = kind.least.needed_bytes
        held = self.limit_bytes - left
        raise InfeasibleBudget(
            f"part {part.name!r} needs {format_bytes(needed)} with its least plan, and "
            f"{format_bytes(held)} are held when it starts: more than the budget of "
            f"{format_bytes(self.limit_bytes)}. Raise the budget, or {self._wanted}",
            budget_bytes=self.limit_bytes,
            minimum_bytes=held + needed,
        )

    def _following_bytes(self, part: Part) -> int:
        """Return the peak of the parts that have not run in this step, with their least plans."""
        held = peak = 0
        for other, kind in self.latest.items():
            if other is not part and other not in self.called:
                peak = max(peak, held + kind.least.needed_bytes)
                held += kind.least.staying_bytes
        return peak

    # -- parts --------------------------------------------------------------------------------

    def kind_of(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Return what kind of part a call is, captured the first time; None without a gradient.

        Raises
        ------
        BadInput, CaptureError, OpaqueChanged
            If the part cannot be captured.
        """
        leaves, spec = flatten(args, kwargs)
        if self.recorder is None or not part.needs_gradient(leaves):
            return None
        known = self.kinds.known(part, leaves, spec)
        if known is not None:
            return known
        with self.recorder.unwatched():
            return self.kinds.capture(part, args, kwargs, self.options)

    def run(
        self, part: Part, call: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one forward of a part by its plan; its own forward if nothing needs a gradient.

        Raises
        ------
        InfeasibleBudget
            If its least plan does not fit.
        """
        recorder = self.recorder
        if call is None or recorder is None:
            return part.function(*args, **kwargs)
        kind = call.kind
        holding = self._holding_for(part, kind)
        self.latest[part] = kind
        self.called.add(part)
        number = recorder.forward_begins(part, kind, holding)

        def started(run: Run) -> None:
            recorder.backward_begins(number)
            self.kinds.learn_outputs(part, call.key, run)

        def finished(run: Run) -> None:
            if run.state == "failed":
                self.abandon()
            else:
                recorder.backward_ended()

        run = Run(started, finished)
        self.open.add(run)
        weakref.finalize(run, recorder.dropped, number)
        leaves = kind.inputs(call.leaves)
        inputs = placeholder_tensors(kind.captured.joint, part.modules, leaves)
        outputs = kind.runner(holding)(inputs, run)
        recorder.forward_ended(number)
        return kind.captured.joint.structure.filled(outputs)


def _plans_in_use(ledger: Ledger[Kind]) -> dict[str, tuple[Plan, ...]]:
    """Return the plans that the calls of each kind ran, in the order of the first calls."""
    used: dict[str, dict[Holding, None]] = {}
    for kind, holding in zip(ledger.calls, ledger.holdings, strict=True):
        used.setdefault(kind.name, {})[holding] = None
    return {name: tuple(holding.plan for holding in holdings) for name, holdings in used.items()}


def _where(ledger: Ledger[Kind]) -> str:
    """Say where a step had its peak."""
    mark = max(ledger.marks, key=lambda mark: mark.peak_bytes)
    if mark.phase == "between":
        return "between the planned parts (other modules, the loss, communication, the optimizer)"
    return f"in the {mark.phase} of part {ledger.calls[mark.call].name!r}"
