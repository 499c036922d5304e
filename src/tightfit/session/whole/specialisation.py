"""A captured step of a fitted callable, and its plans."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, get_args

import msgspec

from tightfit.allocator.resident import element_bytes
from tightfit.capture.captured import Captured, StepGuards
from tightfit.execution.far.copier import copying_cpu_s
from tightfit.execution.far.step import Moved
from tightfit.execution.guard import StepPeaks
from tightfit.execution.runtime import Runner
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Outcome, Plan
from tightfit.planners.background import Search, searching
from tightfit.planners.questions.least_budgets import LeastBudgets
from tightfit.pricing.in_steps import StepCosts, Tuner, recall, remember, with_step_costs
from tightfit.progress import Progress
from tightfit.session.memory.surroundings import Surroundings, assumed_outside_bytes
from tightfit.session.options import Options
from tightfit.session.processes import agreed
from tightfit.session.report import Report, planned_moves, report_of
from tightfit.session.step.gradient_lives import GradientLives
from tightfit.session.whole.compile_trials import CompiledPlan
from tightfit.session.whole.earlier import earlier_plan, earlier_plans
from tightfit.session.whole.known_plans import KnownPlans
from tightfit.session.whole.postponed import PostponedAlternatives
from tightfit.session.whole.user_code import Unmet, UserCode


class Moves:
    """The bytes that the last step of a plan has moved to far memory and back."""

    def __init__(self) -> None:
        self._moved: Callable[[], Moved | None] = lambda: None

    @property
    def last(self) -> Moved | None:
        """None: no step has ended yet."""
        return self._moved()

    def ended(self, moved: Callable[[], Moved]) -> None:
        """Note that a step has ended; `moved`: returns the bytes that it has moved."""
        self._moved = moved


@dataclass(frozen=True)
class Planned:
    """A plan ready to run."""

    graph: Graph  # with memory resident around the step
    outcome: Outcome
    runner: Runner
    compiled: CompiledPlan | None = None  # None: it runs operator by operator
    beats_compiled: bool = False  # whether running operator by operator was measured to be faster
    moves: Moves | None = None  # bytes its steps move to far memory; None: none
    number: int = field(default_factory=itertools.count().__next__)  # its identity in the process

    @property
    def compiled_peak_bytes(self) -> int | None:
        """The measured peak of the compiled plan; None: it runs operator by operator."""
        return self.compiled.peak_bytes(self.graph) if self.compiled is not None else None

    def report(self, more_bytes: int, budget_bytes: int, steps: Sequence[StepPeaks]) -> Report:
        """Return the figures of the plan, and bytes held by the last of some steps.

        `more_bytes`: held now beyond bytes held when the plan was made.
        """
        compiled = self.compiled_peak_bytes
        known = report_of(
            msgspec.structs.replace(self.outcome, peak_bytes=self.outcome.peak_bytes + more_bytes),
            self.graph.constant_bytes + more_bytes,
            budget_bytes,
            self.graph.cost_source,
            steps[-1] if steps else None,
            None if compiled is None else compiled + more_bytes,
        )
        if self.moves is None:
            return known
        planned = planned_moves(self.graph, self.outcome)
        return msgspec.structs.replace(known, moves=planned, measured_moves=self.moves.last)


class Specialisation:
    """A captured step for one signature of inputs and modules and one outcome of its guards.

    `key`: the signature. `guards`: what the step depends on in addition. `is_further`: whether the
    same call was captured before, so that its first plan must not wait. `user_code`: memory of user
    code between forward and backward. `surplus_bytes`: bytes that a backward held beyond its plan,
    as user code holds them until its end. `lives`: of its gradients; None: as in most loops.
    `tuner`: times the first steps; None when costs are final. `used`: the number of the last call
    that used it. `postponed`: alternatives that are still to be compared; None: there are none.
    `places`: which inputs of a handed graph are its placeholders; empty: some are no inputs; None:
    not known yet. `received`: the outputs that had gradients in its last backward; None: there was
    none.
    """

    def __init__(
        self, key: Any, captured: Captured, guards: StepGuards, *, is_further: bool = False
    ) -> None:
        self.key = key
        self.captured = captured
        self.guards = guards
        self.is_further = is_further
        self.user_code = UserCode(assumed_outside_bytes(captured))
        self.surplus_bytes = 0
        self.lives: GradientLives | None = None
        self.tuner: Tuner | None = None
        self.used = 0
        self.places: tuple[int, ...] | None = None
        self.received: frozenset[int] | None = None
        every = captured.with_postponed
        self.postponed = None if every is None else PostponedAlternatives(every)
        self._plans: dict[Surroundings, Planned] = {}
        self._optimistic: dict[Surroundings, Planned] = {}
        self._refused: dict[Surroundings, int] = {}
        self.known = KnownPlans()
        self.least_budgets = LeastBudgets()
        self._searches: dict[Surroundings, Search[Outcome]] = {}
        weakref.finalize(self, _cancel, self._searches)  # not awaited when the model is gone
        self._searched: set[Surroundings] = set()
        self._step_costs: StepCosts | None = None

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the tensors among its inputs."""
        pairs = zip(self.captured.joint.placeholders, self.captured.joint.sources, strict=True)
        values = (node.meta.get("val") for node, source in pairs if source.kind != "tangent")
        return element_bytes(values)

    @property
    def with_postponed(self) -> Captured:
        """The step with all alternatives, also those that are still to be compared."""
        return self.captured if self.postponed is None else self.postponed.captured

    def use(self, call: int) -> None:
        self.used = call

    def note_places(self, places: tuple[int, ...]) -> None:
        self.places = places

    def note_received(self, outputs: frozenset[int]) -> None:
        self.received = outputs

    @property
    def may_receive_less(self) -> bool:
        """Whether gradients of some outputs may never come, of several that are planned."""
        planned = {s.index for s in self.captured.joint.sources if s.kind == "tangent"}
        return len(planned) > 1 and not planned <= (self.received or frozenset())

    # -- plans --------------------------------------------------------------------------------

    @property
    def plans(self) -> Mapping[Surroundings, Planned]:
        """The plans that are ready to run, by the surroundings that they were made for."""
        return MappingProxyType(self._plans)

    def has(self, planned: Planned) -> bool:
        return self.made_for(planned) is not None

    def has_only(self, planned: Planned, plans: int) -> bool:
        """Whether there are so many plans, this among them, none optimistic and none searched."""
        if self._searches or self._optimistic or len(self._plans) != plans:
            return False
        return self.has(planned)

    def with_measured_user_code(self, surroundings: Surroundings) -> Surroundings:
        """Return surroundings with measured bytes of user code, unless a plan is known."""
        measured_bytes = self.user_code.measured_bytes
        if surroundings in self._plans or measured_bytes is None:
            return surroundings
        return surroundings.with_outside(max(surroundings.outside_bytes, measured_bytes))

    def fitting(self, surroundings: Surroundings) -> Planned | None:
        """Return the plan made for these surroundings of the step, or the best that fits."""
        planned = self._plans.get(surroundings)
        if planned is not None:
            return planned
        fitting = [
            planned
            for made_for, planned in self._plans.items()
            if _fits(planned, made_for, surroundings) and planned.compiled is None
        ]
        return min(fitting, key=lambda planned: planned.outcome.overhead, default=None)

    def made_for(self, planned: Planned) -> Surroundings | None:
        """Return the surroundings that a plan was made for; None: it is not ready to run."""
        return next(
            (surroundings for surroundings, known in self._plans.items() if known is planned), None
        )

    def more_held_bytes(self, planned: Planned, surroundings: Surroundings) -> int:
        """Return how much more is held now than in the surroundings that a plan was made for."""
        return surroundings.held_bytes - (self.made_for(planned) or surroundings).held_bytes

    def grown_bytes(self, surroundings: Surroundings) -> int:
        """Return how much more is held now than in the surroundings of the first plan."""
        held = [o.held_bytes for o in self._plans if o.gradients == surroundings.gradients]
        return max(0, surroundings.held_bytes - min(held, default=surroundings.held_bytes))

    def may_gain(self, surroundings: Surroundings, planned: Planned) -> bool:
        """Whether a search may find a plan that uses more of the room than a known plan."""
        if surroundings in self._plans or planned.outcome.overhead <= 0:
            return False
        if any(_alike(surroundings, other) for other in (*self._plans, *self._searched)):
            return False
        own = self.made_for(planned)
        assert own is not None
        return surroundings.room_bytes > own.room_bytes + _ALIKE * surroundings.budget_bytes

    def add_plan(self, surroundings: Surroundings, planned: Planned) -> Planned:
        """Run a plan from now on in its surroundings; return it."""
        self._plans[surroundings] = planned
        return planned

    def optimistic(self, surroundings: Surroundings) -> Planned | None:
        """Return a plan without room for all expected memory, if any was added."""
        alike = (p for other, p in self._optimistic.items() if _alike(surroundings, other))
        return self._optimistic.get(surroundings) or next(alike, None)

    @property
    def was_optimistic(self) -> bool:
        """Whether any plan has no room for all expected memory."""
        return bool(self._optimistic)

    def add_optimistic(self, surroundings: Surroundings, planned: Planned) -> Planned:
        """Run a plan from now on where none has room for all expected memory; return it."""
        self._optimistic[surroundings] = planned
        return planned

    def note_refused(self, surroundings: Surroundings, lacking_bytes: int) -> None:
        """Note surroundings for which no plan was found.

        `lacking_bytes`: by which the least known plan exceeds their budget.
        """
        self._refused[surroundings] = lacking_bytes

    def was_refused(self, surroundings: Surroundings) -> bool:
        """Whether no plan was found in surroundings with at least about as much room."""
        close = int(_ALIKE * surroundings.budget_bytes)
        return any(
            _comparable(surroundings, other)
            and surroundings.room_bytes < other.room_bytes + max(close, lacking_bytes)
            and surroundings.outside_bytes >= other.outside_bytes - close
            for other, lacking_bytes in self._refused.items()
        )

    def unmet_by(self, planned: Planned) -> Unmet | None:
        """Return expected memory that a plan has no room for; None: none, or not known."""
        if not self._refused or all(planned is not each for each in self._optimistic.values()):
            return None
        surroundings, lacking_bytes = next(reversed(self._refused.items()))
        if surroundings.part < 1.0:
            return None
        return Unmet(surroundings.outside_bytes, surroundings.whole_bytes + lacking_bytes)

    @property
    def running(self) -> tuple[Plan, ...]:
        """All plans by which steps run."""
        every = itertools.chain(self._plans.values(), self._optimistic.values())
        return tuple(each.outcome.plan for each in every if each.outcome.plan is not None)

    def forget_plans(self) -> None:
        """Drop the plans that are ready to run, and end searches for better plans."""
        self._drop_plans()
        self._refused.clear()

    def _drop_plans(self) -> None:
        self._plans.clear()
        self._optimistic.clear()
        _cancel(self._searches)
        self._searched.clear()

    # -- searches in the background -----------------------------------------------------------

    def search(self, surroundings: Surroundings, plan: Callable[[Progress], Outcome]) -> None:
        """Begin to search a better plan in the background."""
        self._searched.add(surroundings)
        self._searches[surroundings] = Search(plan)

    def ended_search(
        self, surroundings: Surroundings
    ) -> tuple[Surroundings, Search[Outcome]] | None:
        """Return, once, a search that has ended and whose plan fits, with its surroundings."""
        for made_for, search in self._searches.items():
            fits = made_for == surroundings or _leaves_more(surroundings, made_for)
            if fits and search.is_done:
                return made_for, self._searches.pop(made_for)
        return None

    @property
    def searches(self) -> Mapping[Surroundings, Search[Outcome]]:
        """The searches that go on or whose plan is not used yet."""
        return MappingProxyType(self._searches)

    # -- learning -----------------------------------------------------------------------------

    def recall_costs(self, options: Options) -> None:
        """Use costs from steps of an earlier process, else time the first steps of this."""
        graph = self.captured.graph
        own = recall(graph) if options.cache else None
        key = f"kept costs {fingerprint(graph)}"
        costs = agreed(options.ranks, key, StepCosts | None, lambda: own)
        if costs is None:
            self.tuner = Tuner(searching, copying_cpu_s)
        else:
            self._step_costs = costs
            self.captured = self.captured.with_graph(with_step_costs(graph, costs))

    def recall_plans(self, options: Options) -> None:
        """Read the plans by which an earlier process ran such a step, and its least plans."""
        self.known = KnownPlans(earlier_plans(self.captured.graph, options))
        for gradients in get_args(Gradients):
            least = earlier_plan(self.captured.graph, "least", gradients, options)
            if least is not None:
                self.known.remember(least)

    def use_step_costs(self, options: Options) -> None:
        """Use costs from timed steps, once they are ready, and drop plans made without them."""
        if self.tuner is None or not self.tuner.is_ready:
            return
        graph = self.captured.graph
        costs = agreed(
            options.ranks, f"step costs {fingerprint(graph)}", StepCosts, self.tuner.costs
        )
        if options.cache:
            remember(graph, costs)
        self._step_costs = costs
        self.captured = self.captured.with_graph(with_step_costs(graph, costs))
        self.tuner = None
        self.known.retire(self.running)
        self._drop_plans()  # but not the surroundings for which no plan was found

    # -- alternatives that are compared later ---------------------------------------------------

    @property
    def has_comparisons(self) -> bool:
        """Whether alternatives are still to be compared that could save time."""
        costs = any(planned.outcome.overhead > 0 for planned in self._plans.values())
        return self.postponed is not None and costs and not self.postponed.is_done

    def use_compared(self, options: Options, room_bytes: int) -> None:
        """Use the postponed alternatives that are as exact as they state.

        `room_bytes`: memory for each comparison that is still to be made.
        """
        if self.postponed is None:
            return
        before, with_postponed = self.captured.graph, self.postponed.captured.graph
        self.captured = self.postponed.compared(options, room_bytes)
        self.postponed = None
        after = self.captured.graph
        self.known.renumber_alternatives(self.running, before, with_postponed, after)
        if self._step_costs is not None:
            costs = self._step_costs = self._step_costs.among(before, after)
            self.captured = self.captured.with_graph(with_step_costs(after, costs))
        if self.tuner is not None:
            self.tuner = self.tuner.among(before, after)
        self.forget_plans()

    def note_backward_peak(self, planned: Planned, peak_bytes: int) -> None:
        """Note bytes held by a backward of one of the plans, constants of that plan included."""
        if self.has(planned):
            self.surplus_bytes = max(self.surplus_bytes, peak_bytes - planned.outcome.peak_bytes)

    def note_lives(self, lives: GradientLives | None) -> None:
        """Note what became of the gradients of a step, if others waited for them."""
        if lives is not None:
            self.lives = lives
            self.surplus_bytes = 0  # which was of gradients that wait


def _cancel(searches: dict[Surroundings, Search[Outcome]]) -> None:
    for search in searches.values():
        search.cancel()
    searches.clear()


_ALIKE = 1 / 64  # of the budget: differences up to this need no other search


def _comparable(surroundings: Surroundings, other: Surroundings) -> bool:
    """Whether a plan for some surroundings may run in others, if they leave enough room."""
    return (surroundings.gradients, surroundings.far) == (other.gradients, other.far)


def _fits(planned: Planned, made_for: Surroundings, surroundings: Surroundings) -> bool:
    """Whether a plan that was made for other surroundings keeps to the budget in these."""
    more_bytes = surroundings.held_bytes - made_for.held_bytes
    return (
        _comparable(made_for, surroundings)
        and surroundings.outside_bytes <= made_for.outside_bytes
        and planned.outcome.peak_bytes + more_bytes <= surroundings.budget_bytes
    )


def _leaves_more(surroundings: Surroundings, other: Surroundings) -> bool:
    """Whether any plan for other surroundings fits these."""
    return (
        _comparable(other, surroundings)
        and surroundings.outside_bytes <= other.outside_bytes
        and surroundings.room_bytes >= other.room_bytes
    )


def _alike(surroundings: Surroundings, other: Surroundings) -> bool:
    """Whether plans for some surroundings are about as good for others."""
    close = _ALIKE * surroundings.budget_bytes
    return (
        _comparable(surroundings, other)
        and abs(surroundings.room_bytes - other.room_bytes) <= close
        and abs(surroundings.outside_bytes - other.outside_bytes) <= close
    )
