"""The plans found so far, the proven bound, and the schedules that a search may combine."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tightfit._core import _engine
from tightfit.planners.engine.problem import EngineProblem

Ranges: TypeAlias = Any  # array of int32, rows of (value, first stage, last stage)

_SIZE = 10
_NEAR = 4  # entries in which plans that count as alike may differ


@dataclass(frozen=True)
class PooledSchedule:
    """A schedule as data: residency by stage, choices, and cost in engine units."""

    ranges: Ranges
    first_choices: tuple[int, ...]
    again_choices: tuple[int, ...]
    cost: int
    fits: bool

    @staticmethod
    def of(schedule: _engine.Schedule) -> PooledSchedule:
        """Copy the state of a schedule."""
        return PooledSchedule(
            schedule.ranges(),
            tuple(schedule.first_choices()),
            tuple(schedule.again_choices()),
            schedule.cost,
            schedule.fits,
        )

    def load(self, schedule: _engine.Schedule) -> None:
        """Make a schedule equal to another."""
        schedule.load(self.ranges, self.first_choices, self.again_choices)


class Pool:
    """The best schedules that fit, unlike each other, and the best proven bound; thread-safe.

    `gap`: the search is over once the overhead is within this fraction of the bound.
    """

    def __init__(self, problem: EngineProblem, gap: float) -> None:
        self.problem = problem
        self.gap = gap
        self.plans: list[PooledSchedule] = []
        self.bound = -1.0
        self.bound_source = "trivial"
        self.known = math.inf  # the least overhead of plans found elsewhere, in another order
        self.infeasible = False
        self.seeds: list[PooledSchedule] = []  # schedules of programs that may exceed the budget
        self._lock = threading.Lock()
        ops = problem.engine.op_count
        self._probes = [ops * k // 12 for k in (6, 7, 8, 9, 10)]

    @property
    def best(self) -> PooledSchedule | None:
        return self.plans[0] if self.plans else None

    @property
    def overhead(self) -> float:
        return self.problem.overhead(self.plans[0].cost) if self.plans else math.inf

    @property
    def done(self) -> bool:
        """Whether infeasibility is proven, or that nothing here beats the known best by the gap."""
        return self.infeasible or min(self.overhead, self.known) - self.bound <= self.gap

    @property
    def target(self) -> int:
        """The cost at which the gap is closed."""
        bound = self.bound  # read once: another thread may raise it
        if not -1.0 < bound < math.inf:
            return 0
        return self.problem.cost_at(bound + 0.9 * self.gap)

    def raise_bound(self, bound: float, source: str) -> None:
        """Take in a proven lower bound on the overhead."""
        with self._lock:
            if bound > self.bound:
                self.bound, self.bound_source = bound, source
                self.infeasible = self.infeasible or bound == math.inf

    def learn(self, overhead: float) -> None:
        """Take in the overhead of a plan found elsewhere, in another order."""
        self.known = min(self.known, overhead)

    def add_seed(self, found: PooledSchedule) -> None:
        """Take in a schedule worth repairing."""
        with self._lock:
            self.seeds.append(found)

    def take_seed(self) -> PooledSchedule | None:
        """Return the newest schedule worth repairing, once."""
        with self._lock:
            return self.seeds.pop() if self.seeds else None

    def add(self, found: PooledSchedule | None) -> bool:
        """Take in a schedule; return whether it is the best so far."""
        if found is None or not found.fits:
            return False
        with self._lock:
            better = not self.plans or found.cost < self.plans[0].cost
            if any(plan.cost == found.cost for plan in self.plans):
                return False
            for k, plan in enumerate(self.plans):
                if self._alike(plan, found):
                    if found.cost < plan.cost:
                        self.plans[k] = found
                        self.plans.sort(key=lambda c: c.cost)
                    return better
            self.plans.append(found)
            self.plans.sort(key=lambda c: c.cost)
            del self.plans[_SIZE:]
            return better

    def pick(self, random_: random.Random, power: float) -> PooledSchedule:
        """Return a random schedule, better ones more often."""
        with self._lock:
            return self.plans[int(len(self.plans) * random_.random() ** power)]

    def _alike(self, one: PooledSchedule, other: PooledSchedule) -> bool:
        values = self.problem.engine.value_count
        differing = 0
        for stage in self._probes:
            a, b = (_resident(plan.ranges, values, stage) for plan in (one, other))
            differing += int(np.count_nonzero(a ^ b))
        return differing <= _NEAR


def _resident(ranges: Ranges, values: int, stage: int) -> Any:
    """Whether each value is resident at the start of a stage."""
    alive = np.zeros(values, dtype=bool)
    alive[ranges[(ranges[:, 1] <= stage) & (stage <= ranges[:, 2]), 0]] = True
    return alive


def cross(
    problem: EngineProblem, a: PooledSchedule, b: PooledSchedule, random_: random.Random
) -> PooledSchedule:
    """Combine two schedules: b's residency on a run of stages or values, a's elsewhere.

    Choices of alternatives come with the stages, unless some are linked: then all are a's.

    Any residency is a valid schedule; the result has to be loaded and repaired.
    """
    stages, values = problem.engine.op_count, problem.engine.value_count
    first_choices = list(a.first_choices)
    kind = random_.random()
    low_stage, high_stage = sorted(random_.randrange(stages + 1) for _ in range(2))
    low_value, high_value = sorted(random_.randrange(values + 1) for _ in range(2))
    if kind < 0.35:
        high_stage = stages + 1
    if kind < 0.65:
        low_value, high_value = 0, values
    elif kind < 0.85:
        low_stage, high_stage = 0, stages + 1
    inside = _cut(_of_values(b.ranges, low_value, high_value), low_stage, high_stage - 1)
    mine = _of_values(a.ranges, low_value, high_value)
    parts = [
        _of_values(a.ranges, 0, low_value),
        _of_values(a.ranges, high_value, values),
        _cut(mine, 0, low_stage - 1),
        inside,
        _cut(mine, high_stage, stages),
    ]
    if kind < 0.65 and not problem.choices:
        first_choices[low_stage:high_stage] = b.first_choices[low_stage:high_stage]
    ranges = np.concatenate(parts)
    return PooledSchedule(ranges, tuple(first_choices), a.again_choices, 0, False)


def _of_values(ranges: Ranges, low: int, high: int) -> Ranges:
    """The ranges of values from `low` to before `high`."""
    return ranges[(low <= ranges[:, 0]) & (ranges[:, 0] < high)]


def _cut(ranges: Ranges, first: int, last: int) -> Ranges:
    """The part of the ranges within two stages."""
    cut = np.column_stack(
        (ranges[:, 0], np.maximum(ranges[:, 1], first), np.minimum(ranges[:, 2], last))
    )
    return cut[cut[:, 1] <= cut[:, 2]]
