"""Costs from inside real steps: of an op among its neighbours, not alone.

Isolated timings mislead op by op (warm caches, no page faults). The first steps of a fitted model
are timed compute by compute, and the plan is made once more with those costs. They are kept on
disk, so that the next process starts with them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import torch

from tightfit.costs import Cache
from tightfit.costs.measured.call import environment_of
from tightfit.graph.alternatives import number_among
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Alternative, Graph, Op, OpId

TIMED_STEPS = 4


class StepCosts(msgspec.Struct, frozen=True):
    """Medians of timed computes."""

    computes: tuple[tuple[OpId, int, float], ...]  # op, alternative, seconds

    def among(self, before: Graph, after: Graph) -> StepCosts:
        """Return the same with the numbers that alternatives have in another graph of the step."""
        numbered = (
            (op, number_among(before, after, op, alternative), seconds)
            for op, alternative, seconds in self.computes
        )
        return StepCosts(tuple((op, n, s) for op, n, s in numbered if n is not None))


class Tuner:
    """Collects the CPU time of every compute of the first steps.

    Only on a CPU: a GPU runs ahead of the clock, and its isolated timings are true.

    `is_disturbed`: whether something else in this process takes processor time now, such as a
    planner. `copying_s`: the processor time that copying to far memory has taken so far.
    """

    def __init__(
        self, is_disturbed: Callable[[], bool], copying_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._is_disturbed = is_disturbed
        self._copying_s = copying_s
        self._times: dict[tuple[int, int], list[list[float]]] = {}
        self._last = 0.0
        self._is_own = torch.get_num_threads() == 1
        self.steps = 0
        self._counts = True

    def begin(self) -> None:
        """Start the clock: a program begins or goes on."""
        self._last = self._now()

    def _now(self) -> float:
        """Return the time of this thread, or of the process without copies."""
        return time.thread_time() if self._is_own else time.process_time() - self._copying_s()

    def begin_step(self) -> None:
        """Start a new timed step; none that is disturbed, unless the clock is the thread's own."""
        self._counts = self._is_own or not self._is_disturbed()
        if self._counts:
            self.steps += 1
        self.begin()

    def clock(self, op: int, alternative: int) -> None:
        """Attribute the time since the last call to a compute; op -1 only restarts the clock."""
        now = self._now()
        if op >= 0 and self._counts:
            step = self._times.setdefault((op, alternative), [])
            while len(step) < self.steps:
                step.append([])
            if step:
                step[-1].append(now - self._last)
        self._last = self._now()

    def among(self, before: Graph, after: Graph) -> Tuner:
        """Return a tuner that has timed the same, for another graph of the step."""
        other = Tuner(self._is_disturbed, self._copying_s)
        other.steps = self.steps
        for (op, alternative), steps in self._times.items():
            number = number_among(before, after, op, alternative)
            if number is not None:
                other._times[op, number] = [list(step) for step in steps]
        return other

    @property
    def is_ready(self) -> bool:
        """Whether enough steps were timed; the first warms up and does not count."""
        return self.steps > TIMED_STEPS

    def costs(self) -> StepCosts:
        """Return the medians over the timed steps, the first left out."""
        medians: list[tuple[OpId, int, float]] = []
        for (op, alternative), steps in self._times.items():
            times = [seconds for step in steps[1:] for seconds in step]
            if times:
                medians.append((op, alternative, statistics.median(times)))
        return StepCosts(tuple(medians))


def with_step_costs(graph: Graph, costs: StepCosts) -> Graph:
    """Return the graph with costs from inside real steps.

    Alternatives that never ran keep their isolated cost, scaled as the op's default is.
    """
    measured: dict[OpId, dict[int, float]] = {}
    for op, alternative, seconds in costs.computes:
        measured.setdefault(op, {})[alternative] = seconds
    ops = tuple(_tuned(op, measured.get(op.id, {})) for op in graph.ops)
    return msgspec.structs.replace(graph, ops=ops, cost_source="measured in steps")


def _tuned(op: Op, measured: dict[int, float]) -> Op:
    if 0 not in measured:
        return op
    before = min(v.cost_s for v in op.alternatives[0].variants)
    scale = measured[0] / before if before > 0 else 1.0
    alternatives: list[Alternative] = []
    for index, alternative in enumerate(op.alternatives):
        fastest = min(v.cost_s for v in alternative.variants)
        own = measured[index] / fastest if index in measured and fastest > 0 else scale
        variants = tuple(
            msgspec.structs.replace(v, cost_s=v.cost_s * own) for v in alternative.variants
        )
        alternatives.append(msgspec.structs.replace(alternative, variants=variants))
    return msgspec.structs.replace(op, alternatives=tuple(alternatives))


def remember(graph: Graph, costs: StepCosts) -> None:
    """Keep the costs of a step for the next process on this machine."""
    cache = _cache(graph)
    cache.put(_key(graph), costs)
    cache.save()


def recall(graph: Graph) -> StepCosts | None:
    """Return the costs of a step that an earlier process measured, if one did."""
    return _cache(graph).get(_key(graph), StepCosts)


def _cache(graph: Graph) -> Cache:
    return Cache(environment_of(graph.device.kind))


def _key(graph: Graph) -> str:
    return f"costs in steps of {fingerprint(graph)}"
