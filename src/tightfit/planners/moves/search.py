"""The search for moves: offer values to be moved, plan around them, change the offer.

The steps of the search are: offer a value more or less, or let it leave or come back earlier or
later. Others assume a faster or slower link, or raise or lower the toll of loads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from tightfit.graph.ir import ValueId
from tightfit.plan.assemble import Step
from tightfit.plan.plan import Load
from tightfit.planners.anytime.clock import Clock
from tightfit.planners.base import Limits
from tightfit.planners.moves.bound import MovesBound
from tightfit.planners.moves.evaluate import Choice, MovesEvaluator, MovesPlan
from tightfit.planners.moves.gaps import Shift
from tightfit.progress import Interrupts, Progress
from tightfit.units import format_percent

_MARGINS = (0.0, 0.08, 0.2)  # of the budget, left free by programs that give seeds
_ALWAYS_WAITING = 1000.0
"""A pace at which every value leaves as soon as it is used and returns right before its next use.

That takes the least near memory, and stalls for every transfer.
"""

_WAYS = (
    *((0.02, 1.05), (0.02, 0.8), (0.1, 1.0), (0.02, 1.3)),
    *((0.1, 1.3), (0.02, 2.0), (0.02, 8.0)),
    *((0.02, _ALWAYS_WAITING), (0.1, _ALWAYS_WAITING)),
)
"""Tolls and paces that are tried first."""

_FEW_WAYS = _WAYS[:3]

_LARGEST_SHIFT = 12  # ops
_KEPT = 4  # of the best plans
_ITERATIONS = 40  # of search around a greedy plan, in every second step
_LARGE = 1000  # ops
_RESTART_SHARE = 0.4  # of the steps on smaller graphs plan from the start
_AT_RANDOM = 0.2  # of them offer values at random
_EVALUATION_ITERATIONS = 20  # one evaluation counts for so many under an iteration limit
_PROGRAM_S = 10.0
_PROGRAM_SHARE = 0.15  # of the time
_SEARCH_SHARE = 0.75
_FIRST_SHARE, _LAST_SHARE = 0.3, 0.9  # of the time that is left, for searches around one plan
_AROUND = (1.05, 0.05)  # pace and toll
_NODES = 2000


class MovesSearch:
    """Plans with moves in one order.

    `evaluator`: evaluates a choice of moves. `target`: the overhead (a fraction) to get below:
    that of the plan without moves. `interrupts`: whether the user has asked to end it, also where
    other code has caught that.
    """

    def __init__(
        self,
        evaluator: MovesEvaluator,
        bound: MovesBound,
        clock: Clock,
        progress: Progress,
        target: float,
        interrupts: Interrupts,
    ) -> None:
        self.evaluator = evaluator
        self.bound = bound
        self.clock = clock
        self.progress = progress
        self.target = target
        self.interrupts = interrupts
        self.random = random.Random(clock.limits.seed)
        self.starts: tuple[Sequence[Step] | None, ...] = (None,)
        self.plans: list[MovesPlan] = []
        self.tried = 0

    @property
    def best(self) -> MovesPlan | None:
        return self.plans[0] if self.plans else None

    @property
    def overhead(self) -> float:
        """The least overhead known, without moves or with."""
        return min([self.target, *(plan.result.overhead for plan in self.plans[:1])])

    @property
    def done(self) -> bool:
        """Whether the gap is closed, it is proven that there is no plan, or the user ends it."""
        gap = self.overhead - self.bound.overhead
        is_closed = self.bound.infeasible or gap <= self.clock.limits.gap
        return is_closed or self.interrupts.seen

    def run(self, plain: Sequence[Step] | None) -> None:
        """Search until the gap is closed or the limits are reached.

        `plain`: the plan without moves.
        """
        self.starts = (None,) if plain is None else (plain, None)
        whole = self.clock.left()
        if plain is None:  # recomputing alone does not do, and a cut sees one instant only
            self._try_ways(frozenset(self.evaluator.gaps), None, _WAYS)
        for margin in _MARGINS:
            values = self._program(margin, whole)
            for start in self.starts if margin == 0.0 else self.starts[:1]:
                self._try_ways(values, start, _WAYS if margin == 0.0 else _FEW_WAYS)
            if self.done or self._over(whole):
                break
            if not self.plans:
                self._search_around(_FIRST_SHARE, values)
        while self.evaluator.gaps and not (self.done or self._over(whole)):
            self._step()
        self._search_around(_LAST_SHARE)

    def _over(self, whole: float) -> bool:
        """Whether the time for steps is over."""
        return self.clock.left() <= (1.0 - _SEARCH_SHARE) * whole

    def _program(self, margin: float, whole: float) -> frozenset[ValueId]:
        seconds = 1e4 if self.clock.counts_iterations else min(_PROGRAM_S, _PROGRAM_SHARE * whole)
        if margin > 0 and not self.clock.counts_iterations:
            seconds = min(seconds, 0.25 * seconds + 0.5)
        found = self.bound.away(margin, seconds, _NODES if self.clock.counts_iterations else None)
        return frozenset(v for v in found or () if v in self.evaluator.gaps)

    def _try_ways(
        self,
        values: frozenset[ValueId],
        start: Sequence[Step] | None,
        ways: Sequence[tuple[float, float]],
    ) -> None:
        """Offer the same values at several tolls and paces."""
        for toll, pace in ways if values else ():
            if not (self.done or self.clock.left() <= 0):
                self._evaluate(Choice(values, pace, toll), start, 0)

    def _step(self) -> None:
        """Change the choice of one of the best plans."""
        if not self.plans or (self._is_small and self.random.random() < _AT_RANDOM):
            share = self.random.random()
            values = frozenset(v for v in self.evaluator.gaps if self.random.random() < share)
            toll, pace = self.random.choice(_WAYS)
            self._evaluate(Choice(values, pace, toll), self.random.choice(self.starts), 0)
            return
        place = int(len(self.plans) * self.random.random() ** 2)
        found = self.plans[place]
        iterations = _ITERATIONS if self.random.random() < 0.5 else 0
        starts_over = self._is_small and self.random.random() < _RESTART_SHARE
        self._evaluate(self._changed(found), None if starts_over else found.steps, iterations)

    @property
    def _is_small(self) -> bool:
        """Whether a greedy plan is there at once."""
        return len(self.evaluator.task.graph.ops) < _LARGE

    def _changed(self, found: MovesPlan) -> Choice:
        """Return the choice of a plan with one or a few changes."""
        moved = {step.value for step in found.steps if isinstance(step, Load)}
        choice = found.choice
        kind = self.random.random()
        if kind < 0.2:
            return replace(choice, values=frozenset(moved))
        if kind < 0.3:
            pace = choice.pace * self.random.choice((0.7, 0.95, 1.05, 1.5))
            return replace(choice, pace=pace)
        if kind < 0.4:
            toll = min(2.0, max(0.005, choice.toll * self.random.choice((0.4, 0.7, 1.5, 2.5))))
            return replace(choice, toll=toll)
        if kind < 0.6 and moved:
            return self._shifted(choice, self.random.choice(sorted(moved)))
        values = set(choice.values)
        for _ in range(1 + int(self.random.expovariate(1.0))):
            if self.random.random() < 0.5 and values:
                values.discard(self.random.choice(sorted(values)))
            else:
                values.add(self._worth_moving(found, values))
        return replace(choice, values=frozenset(values))

    def _shifted(self, choice: Choice, value: ValueId) -> Choice:
        """Let a value leave or come back earlier or later."""
        by = self.random.randint(-_LARGEST_SHIFT, _LARGEST_SHIFT)
        shifts = dict(choice.shifts)
        old = shifts.get(value, Shift())
        new = Shift(old.leave + by, old.load)
        shifts[value] = new if self.random.random() < 0.5 else Shift(old.leave, old.load + by)
        return replace(choice, shifts=tuple(sorted(shifts.items())))

    def _worth_moving(self, found: MovesPlan, offered: set[ValueId]) -> ValueId:
        """A value that is not offered: mostly a value that is computed again."""
        graph = self.evaluator.task.graph
        again = {op for op, _ in found.result.recomputed}
        made = sorted(
            value
            for op in again
            for way in graph.ops[op].alternatives[:1]
            for value in way.writes
            if value in self.evaluator.gaps and value not in offered
        )
        if made and self.random.random() < 0.7:
            return self.random.choice(made)
        everything = sorted(self.evaluator.gaps)
        sizes = [self.evaluator.sizes[value] for value in everything]
        return self.random.choices(everything, weights=sizes)[0]

    def _evaluate(self, choice: Choice, start: Sequence[Step] | None, iterations: int) -> None:
        self.tried += 1
        self.clock.take(_EVALUATION_ITERATIONS)
        note = f"best {format_percent(self.overhead)}, bound {format_percent(self.bound.overhead)}"
        self.progress.update(self.tried, note)
        seed = self.random.randrange(1 << 30)
        self._add(self.evaluator.evaluate(choice, start, iterations, seed))

    def _search_around(self, share: float, values: frozenset[ValueId] = frozenset()) -> None:
        """Search around the best plan's moves, or others, as hard as without far memory."""
        best = self.best
        if self.done or (best is None and not values):
            return
        limits: Limits = msgspec.structs.replace(
            self.clock.limits,
            seconds=share * max(0.05, self.clock.left()),
            iterations=self.clock.take_share(share),
        )
        choice = Choice(values, *_AROUND) if best is None else best.choice
        start = self.starts[0] if best is None else best.steps
        self._add(self.evaluator.search_around(choice, start, limits, self.progress))

    def _add(self, found: MovesPlan | None) -> None:
        """Keep the best plans, one of each time."""
        if found is None or any(plan.time_s == found.time_s for plan in self.plans):
            return
        self.plans.append(found)
        self.plans.sort(key=lambda plan: plan.time_s)
        del self.plans[_KEPT:]
