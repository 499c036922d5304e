"""Which plan each call of a part runs, so that the whole step keeps to its limit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.allocator.resident import granularity_of
from tightfit.errors import WITHOUT_A_PLAN, InfeasibleBudget
from tightfit.execution.guard import Guard
from tightfit.graph.fingerprint import fingerprint
from tightfit.progress import Progress
from tightfit.session.memory.budget import usable_bytes
from tightfit.session.memory.devices import new_gradient_bytes
from tightfit.session.memory.surroundings import estimate_with_slack
from tightfit.session.options import Options
from tightfit.session.parts.choice import PartPlans, PartPlansMessage, choose, choose_at_once
from tightfit.session.parts.history import CallOrder, StepHistories, StepHistory
from tightfit.session.parts.kind_plans import KindPlans
from tightfit.session.parts.kinds import Kind, Part
from tightfit.session.processes import agreed
from tightfit.session.step.edits import PossibleCall, as_called, with_calls
from tightfit.session.step.held import release_retained
from tightfit.session.step.holding import Holding
from tightfit.session.step.ledger import StepLedger
from tightfit.units import format_bytes

_VARYING = 32  # by which part of its bytes a step may differ from the last, where data decide
_WORTH_A_SEARCH = 0.001  # of overhead
_LEARNED = 8  # steps that are alike; later ones are checked, and peaks are the user's
_ALIKE = 0.005  # of the budget: two steps that differ by less at their begin are alike


@dataclass(frozen=True)
class PartsSettings:
    """Settings that depend on how a model is divided into parts.

    `late_bytes`: the part of the budget that plans leave unused for memory that other threads free
    in their own time. `way_out`: further advice for a user who is short of memory.
    """

    late_bytes: int = 0
    way_out: str = "make the batch smaller"


class StepPlans:
    """The plans of the parts of a model, chosen for whole steps.

    `settings`: those that depend on how the model is divided into parts.
    """

    def __init__(self, name: str, options: Options, guard: Guard, settings: PartsSettings) -> None:
        self.options = options
        self.late_bytes = settings.late_bytes
        self._name = name
        self._guard = guard
        self._way_out = settings.way_out
        self._latest: dict[Part, Kind] = {}
        self._holdings: dict[Part, list[Holding]] = {}  # of the calls of this step
        self._base_bytes = 0  # held at its begin, with memory that will come and stay
        self._ended: StepLedger[Kind] | None = None  # the last complete step
        self._ended_base_bytes = 0  # of that step
        # Held in this step as the first graph of each module began
        self._held_before: dict[Any, int] = {}
        self._histories = StepHistories()
        self._history = StepHistory(None, 0)
        self._order = CallOrder()
        self._possible: dict[Part, PossibleCall[Kind]] = {}
        self._coming_bytes = 0
        self._stepping_bytes = 0
        self._choices_made: Counter[Any] = Counter()
        self._has_graph_breaks = False  # whether anything was left to Python since it began
        self._was_freed = False  # whether saved tensors of this step were, before their backward

    @property
    def limit_bytes(self) -> int:
        """The bytes that a step may hold."""
        assert self.options.budget_bytes is not None
        return usable_bytes(self.options.budget_bytes, self.options.reserve_bytes)

    @property
    def _room_bytes(self) -> int:
        """Of these, the bytes that plans are made for."""
        return self.limit_bytes - self.late_bytes - self.options.left_bytes

    @property
    def latest(self) -> Mapping[Part, Kind]:
        """The kind of the last call of each part."""
        return self._latest

    def change_options(self, options: Options) -> None:
        self.options = options
        self._histories = StepHistories()

    def forget_absent(self) -> None:
        """Forget parts that have not run in the last step: others run in their place now."""
        self._has_graph_breaks = True
        self._latest = {part: kind for part, kind in self._latest.items() if part in self._holdings}
        called = set(self._holdings)
        self._histories.keep(called)
        self._order.keep(called)

    # -- steps --------------------------------------------------------------------------------

    def begin(self, signature: Any, coming_bytes: int, stepping_bytes: int) -> None:
        """Make sure that there are plans for the step that begins.

        `signature`: of the model's inputs. `coming_bytes`: memory that will stay once it exists:
        the optimizer's state. `stepping_bytes`: memory held while the optimizer steps.
        """
        self._coming_bytes, self._stepping_bytes = coming_bytes, stepping_bytes
        held = self._guard.held_bytes() + coming_bytes
        alike_bytes = max(round(_ALIKE * self.limit_bytes), self.late_bytes)
        self._history = self._histories.of(signature, held, alike_bytes)
        self._was_freed = False
        self._possible = {}
        self._holdings = {}
        self._held_before.clear()
        self._base_bytes = held
        ledger = self._history.ledger
        if ledger is not None:
            self._possible = self._may_run(ledger)
            worst = self._worst(ledger, self._possible).with_base(held)
            if self._possible and not self._has_room(worst):  # perhaps they take turns
                self._possible = {}
                worst = ledger.with_base(held)
            self._plan(self._history, self._with_varying(worst))

    def least_peak_bytes(self, ledger: StepLedger[Kind]) -> int:
        """Return the peak of a step if all parts run that may, by least plans."""
        possible = self._may_run(ledger)
        worst = self._worst(ledger, possible)
        # a step without its first part is thought to hold that part's output longer than it does
        spare = max((kind.least.output_bytes for kind in worst.calls), default=0)
        return _peak_at_least(worst) + (spare if possible else 0)

    def least_peak_bytes_after(self, ledger: StepLedger[Kind], left_bytes: int) -> int:
        """Return the peak of a step by least plans, where another step has left so many bytes.

        They are gone as its first backward begins.
        """
        least = _least(ledger)
        peak_bytes = ledger.forward_peak_of(least) + left_bytes
        return max(peak_bytes, ledger.peak_of(least), ledger.outside_bytes)

    def _has_room(self, ledger: StepLedger[Kind]) -> bool:
        """Whether a step of such calls fits with plans that hold little."""
        if self.options.ranks is not None:
            return True  # ranks find that out together
        return self._fits_at_least(ledger) or (
            self._search_least(ledger) and self._fits_at_least(ledger)
        )

    def _with_varying(self, ledger: StepLedger[Kind]) -> StepLedger[Kind]:
        """Return a step with room for calls of ever other sizes, if there is any."""
        if self.options.ranks is not None:
            return ledger  # ranks foresee the same
        varying = self._history.with_varying(ledger)
        return varying if varying is ledger or self._fits_at_least(varying) else ledger

    def _varying_bytes(self, ledger: StepLedger[Kind]) -> int:
        """Return room for code between parts, left to Python because data decide its sizes."""
        if not self._has_graph_breaks or self.options.ranks is not None:
            return 0
        least_bytes = _peak_at_least(ledger)
        own_bytes = least_bytes - ledger.base_bytes
        return max(0, min(own_bytes // _VARYING, self._room_bytes - least_bytes))

    def _fits_at_least(self, ledger: StepLedger[Kind]) -> bool:
        return _peak_at_least(ledger) <= self._room_bytes

    def _worst(
        self, ledger: StepLedger[Kind], possible: Mapping[Part, PossibleCall[Kind]]
    ) -> StepLedger[Kind]:
        """Return a measured step as it is with further calls, each in its turn."""
        return with_calls(ledger, possible, self._order.order())

    @property
    def is_learned(self) -> bool:
        """Whether enough is known of steps such as that which has begun."""
        return self._history.learned >= _LEARNED

    def note_freed(self) -> None:
        """Note that saved tensors were freed before their backward."""
        self._was_freed = self._history.lacked_room = True

    def ended(self, ledger: StepLedger[Kind]) -> None:
        """Learn from a complete step, as far as its peaks were seen."""
        self._histories.note_end(self._history.signature)
        if self._was_freed:
            return  # what its calls held does not follow from their plans
        self._ended, self._ended_base_bytes = ledger, self._base_bytes
        if self._guard.is_learning:
            self._history.ended(ledger)
        else:
            self._history.checked(ledger)
        self._order.note(ledger.parts)

    def planned_bytes(self, ledger: StepLedger[Kind]) -> int:
        """Return the peak that was planned for a step, the parts taken that have run in it."""
        before = self._history.ledger
        if before is None:
            return max(ledger.peak_with({}), ledger.outside_bytes)
        likely = as_called(before, ledger, self._possible)
        if likely is None:
            return self._history.planned_bytes
        likely = likely.with_base(ledger.base_bytes)
        return max(likely.peak_of(ledger.holdings), likely.outside_bytes)

    def _plan(self, history: StepHistory, worst: StepLedger[Kind]) -> None:
        """Make sure that there are plans for a step of such calls, the worst that may come.

        Known plans stay as long as they fit at all: late frees are measured now here, now there,
        and all ranks are to run the same.
        """
        most_bytes = self.limit_bytes
        left_bytes = self._room_bytes - self._varying_bytes(worst)
        plans = history.plans
        if worst.outside_bytes > most_bytes:
            raise self._infeasible(worst)
        found = history.ended_search()
        if found is not None and _fit(found, worst, most_bytes):
            better = found.for_step(_without_modules(worst), left_bytes)
            plans = better if plans is None or better.overhead < plans.overhead else plans
        if plans is None or not _fit(plans, worst, most_bytes):
            plans = self._choose(history, worst, left_bytes)
            self._guard.restart()
        elif history.planned.calls != worst.calls or worst.peak_of(plans.calls) > most_bytes:
            alone = self.options.ranks is None  # ranks decide together, with new plans only
            plans = plans.for_step(_without_modules(worst), left_bytes if alone else 0)
        history.plan(plans, worst)

    def _choose(self, history: StepHistory, ledger: StepLedger[Kind], left_bytes: int) -> PartPlans:
        """Return the plans of a step's calls."""
        if self.options.ranks is not None:
            return self._choose_together(history, ledger, left_bytes)
        alone = _without_modules(ledger)
        found = choose_at_once(alone, left_bytes, self.options)
        if found is not None and found.overhead > _WORTH_A_SEARCH:
            self._search(history, alone, left_bytes)
        if found is None:
            found = choose(alone, left_bytes, self.options)
        if found is None and self._search_least(ledger):
            found = choose(alone, left_bytes, self.options)
        if found is None:
            raise self._infeasible(ledger)
        return found

    def _search(self, history: StepHistory, ledger: StepLedger[KindPlans], left_bytes: int) -> None:
        """Search better plans in the background; that holds neither the model nor its optimizer."""
        options = dataclasses.replace(self.options, optimizer=None, shared=None, steps=None)

        def search(progress: Progress) -> PartPlans | None:
            own = dataclasses.replace(options, progress=progress)
            return choose(ledger, left_bytes, own, apart=True)

        history.search(search)

    def _search_least(self, ledger: StepLedger[Kind]) -> bool:
        """Search longer for plans that hold little; return whether any kind has a new plan."""
        kinds = dict.fromkeys(_without_modules(ledger).calls)
        found = [kind.search_least(self.options.limits) for kind in kinds]
        return any(found)

    def _choose_together(
        self, history: StepHistory, ledger: StepLedger[Kind], left_bytes: int
    ) -> PartPlans:
        """Return the plans of a step's calls: those another rank chose, if they fit."""
        graphs = [fingerprint(kind.captured.graph) for kind in ledger.calls]
        number = self._choices_made[history.signature]
        self._choices_made[history.signature] += 1
        alone = _without_modules(ledger)
        own: PartPlans | None = None

        def make() -> PartPlansMessage:
            nonlocal own
            own = choose(alone, left_bytes, self.options)
            return PartPlansMessage.of(own, alone)

        message = agreed(self.options.ranks, f"parts {number} {graphs}", PartPlansMessage, make)
        found = own or message.plans_for(alone)
        if found is not None and ledger.peak_of(found.calls) > left_bytes + self.late_bytes:
            found = choose(alone, left_bytes, self.options)
        if found is None:
            raise self._infeasible(ledger)
        return found

    def _may_run(self, ledger: StepLedger[Kind]) -> dict[Part, PossibleCall[Kind]]:
        """Return the calls of parts that a step did not have and may have, with least plans."""
        granularity = granularity_of(self._guard.device)
        away = {part: kind for part, kind in self._latest.items() if part not in ledger.parts}
        return {
            part: PossibleCall(kind, kind.least, new_gradient_bytes(part.modules, granularity))
            for part, kind in away.items()
        }

    def later_gradient_bytes(self) -> int:
        """Return the bytes of gradients of all parts that do not exist yet."""
        modules = {name: own for part in self._latest for name, own in part.modules.items()}
        return new_gradient_bytes(modules, granularity_of(self._guard.device))

    def _infeasible(self, ledger: StepLedger[Kind]) -> InfeasibleBudget:
        needed = max(_peak_at_least(ledger), ledger.outside_bytes, self._stepping_bytes)
        return InfeasibleBudget(
            f"no plans were found for the {len(ledger.calls)} parts of {self._name} within "
            f"{format_bytes(self.limit_bytes)}: {format_bytes(ledger.base_bytes)} are held between "
            f"steps, and with plans that save least a step holds {format_bytes(needed)}. Raise the "
            f"budget to that, or {self._way_out}. {WITHOUT_A_PLAN}",
            budget_bytes=self.limit_bytes,
            minimum_bytes=needed,
        )

    # -- calls --------------------------------------------------------------------------------

    def holding_for(self, part: Part, kind: Kind) -> Holding:
        """Return by which plan a part runs: the chosen one, or its least where little is left.

        Raises `InfeasibleBudget` if its least plan does not fit.
        """
        return self._noted(part, kind, self._chosen(part, kind))

    def least_for_now(self, part: Part, kind: Kind) -> Holding | None:
        """Return the least plan of a part if its forward fits: its backward may have more room.

        Memory to come may not exist then, and what is held now may be freed.
        """
        room_bytes = self._left_bytes() + self._coming_bytes
        if self.options.ranks is not None or kind.least.forward_bytes > room_bytes:
            return None
        return self._noted(part, kind, kind.least)

    def _noted(self, part: Part, kind: Kind, holding: Holding) -> Holding:
        self._latest[part] = kind
        self._holdings.setdefault(part, []).append(holding)
        return holding

    def _chosen(self, part: Part, kind: Kind) -> Holding:
        history = self._history
        planned = history.planned_holding(part, kind)
        by_kind = history.plans.kinds.get(kind.plans) if history.plans else None
        if self.options.ranks is not None:
            return planned or by_kind or kind.least  # ranks decide together, between steps
        left = self._left_bytes()
        self._held_before.setdefault(part.member, self.limit_bytes - left)
        is_new = planned is None and by_kind is None
        if is_new and not history.lacked_room and kind.at_first.needed_bytes <= left:
            return kind.at_first
        found = self._fitting(part, kind, planned, by_kind, left)
        if found is None:
            release_retained()
            left = self._left_bytes()
            found = self._fitting(part, kind, planned, by_kind, left)
        if found is None and kind.plans.search_least(self.options.limits):
            found = self._fitting(part, kind, planned, by_kind, left)
        if found is not None:
            return found
        needed = kind.least.needed_bytes
        held = self.limit_bytes - left
        following = self._following_bytes(part) + self._unseen_bytes(part, kind)
        whole = max(self._stepping_bytes, self._needed_as_before(part, held))
        least = max(held + needed, held + kind.least.staying_bytes + following, whole)
        least = estimate_with_slack(least)
        raise InfeasibleBudget(
            f"part {part.name!r} needs {format_bytes(needed)} with its least plan, and "
            f"{format_bytes(held)} are held when it starts: more than the budget of "
            f"{format_bytes(self.limit_bytes)}. Try a budget of {least} bytes "
            f"({format_bytes(least)}), or {self._way_out}. {WITHOUT_A_PLAN}",
            budget_bytes=self.limit_bytes,
            minimum_bytes=least,
        )

    def _left_bytes(self) -> int:
        """Return the bytes that the limit leaves now, without those that are to come and stay."""
        return self.limit_bytes - self._coming_bytes - self._guard.held_bytes()

    def _fitting(
        self, part: Part, kind: Kind, planned: Holding | None, by_kind: Holding | None, left: int
    ) -> Holding | None:
        """Return the plan a part runs where so much is left; None if its least does not fit."""
        chosen = planned or by_kind or kind.least
        for holding in (chosen, kind.least):
            fits = holding.needed_bytes <= left
            if fits and holding is kind.least:
                return holding
            if holding is planned:
                if holding.forward_bytes <= left and self._goes_on_as_planned(left, fits):
                    return holding
            elif fits and holding.staying_bytes + self._following_bytes(part) <= left:
                return holding
        return None

    def _goes_on_as_planned(self, left: int, fits: bool) -> bool:
        """Whether a call may run by the plan that was chosen for it when the step began.

        It may where no more is held than was planned for, or later calls can make up for that.
        """
        held_bytes, history = self.limit_bytes - left, self._history
        if history.holds_as_planned(held_bytes, self.limit_bytes):
            return True
        return fits and history.peak_from_here(held_bytes) <= self.limit_bytes

    def _needed_as_before(self, part: Part, held_bytes: int) -> int:
        """Return the least peak of a step like the last, as far as that is known.

        What the last has left is expected to be gone in the backward, such as its loss. More may be
        held as a part begins than by the plans that have run. Then later modules of its class are
        expected to hold as much more as those before it.
        """
        ledger, base_bytes = self._ended, self._base_bytes
        if ledger is None or part not in ledger.parts:
            return 0
        ledger = self._history.with_varying(ledger.with_base(base_bytes))
        ran = {p: iter(holdings) for p, holdings in self._holdings.items()}
        pairs = [*zip(ledger.parts, ledger.calls, strict=True)]
        now = [next(ran.get(own, iter(())), kind.least) for own, kind in pairs]
        turns = [turn for turn, own in enumerate(ledger.parts) if own is part]
        turn = turns[min(len(self._holdings.get(part, ())), len(turns) - 1)]
        more_bytes = max(0, held_bytes - ledger.begin_of(turn, now))
        modules = [own.member for own in ledger.parts if own.is_of_class(part)]
        gone = {own.member for own in ledger.parts[:turn] if own.is_of_class(part)} - {part.member}
        if gone:
            more_bytes = more_bytes * len({*modules}) // len(gone)
        left_bytes = max(0, base_bytes - self._ended_base_bytes)
        ledger = ledger.with_base(base_bytes - left_bytes)
        return self.least_peak_bytes_after(ledger, left_bytes) + more_bytes

    def _unseen_bytes(self, part: Part, kind: Kind) -> int:
        """Return the peak of modules of the same class that no step has called yet.

        Each is expected to keep as much as those before it, with code between their graphs. Where
        there were none, the last of them works in addition to what it keeps.
        """
        if self._histories.have_ended(self._history.signature):
            return 0  # it has called all that there are
        parts = [other for other in {*self._latest, part} if other.is_of_class(part)]
        modules = {other.member for other in parts}
        if len(modules) < 2:
            unseen, least = max(0, part.alike - len(parts)), kind.least
            working_bytes = least.needed_bytes - least.staying_bytes if unseen else 0
            return unseen * least.staying_bytes + working_bytes
        held = {own: held for own, held in self._held_before.items() if own in modules}
        each = max(_growth(held), kind.least.staying_bytes)
        return max(0, part.alike - len(modules)) * each

    def _following_bytes(self, part: Part) -> int:
        """Return the peak of the parts that have not run in this step, with their least plans."""
        held = peak = 0
        for other, kind in self._latest.items():
            if other is not part and other not in self._holdings:
                peak = max(peak, held + kind.least.needed_bytes)
                held += kind.least.staying_bytes
        return peak


def _growth(held_bytes: Mapping[Any, int]) -> int:
    """Return by how much more was held from one module to the next."""
    held = held_bytes.values()
    return (max(held) - min(held)) // (len(held) - 1) if len(held) > 1 else 0


def _peak_at_least(ledger: StepLedger[Kind]) -> int:
    return ledger.peak_of(_least(ledger))


def _least(ledger: StepLedger[Kind]) -> list[Holding]:
    """Return plans of a step's calls with which it holds little: each saves least, or nothing.

    What saves least until its backward may hold more in it than what keeps everything.
    """
    chosen = {kind: kind.least for kind in ledger.calls}
    peak_bytes = ledger.peak_with(chosen)
    for kind in [*chosen]:
        other = {**chosen, kind: kind.most}
        other_bytes = ledger.peak_with(other)
        if other_bytes < peak_bytes:
            chosen, peak_bytes = other, other_bytes
    return [chosen[kind] for kind in ledger.calls]


def _fit(plans: PartPlans, ledger: StepLedger[Kind], most_bytes: int) -> bool:
    """Whether plans are there for all calls of a step, and keep to its limit."""
    alone = _without_modules(ledger)
    known = all(kind in plans.kinds for kind in alone.calls)
    return known and alone.peak_with(plans.kinds) <= most_bytes


def _without_modules(ledger: StepLedger[Kind]) -> StepLedger[KindPlans]:
    """Return a step of which only graphs and plans are known: what is captured holds modules."""
    calls = tuple(kind.plans for kind in ledger.calls)
    return StepLedger(calls, ledger.holdings, ledger.intervals, base_bytes=ledger.base_bytes)
