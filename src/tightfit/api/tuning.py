"""Costs from inside real steps: what an op takes among its neighbours, not alone.

Isolated timings mislead op by op (warm caches, no page faults); the first steps of a fitted model
are timed compute by compute, and the plan is made once more with those costs.
"""

from __future__ import annotations

import statistics
import time

import msgspec
import torch

from tightfit.graph.ir import Graph, Op

__all__ = ["TIMED_STEPS", "Tuner"]

TIMED_STEPS = 4


class Tuner:
    """Collects the CPU time of every compute of the first steps.

    Only on a CPU: a GPU runs ahead of the clock, and its isolated timings are true.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], list[list[float]]] = {}
        self._last = 0.0
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.process_time
        self.steps = 0

    def begin(self) -> None:
        """Start the clock: a program begins or goes on."""
        self._last = self._now()

    def begin_step(self) -> None:
        """Start a new timed step."""
        self.steps += 1
        self.begin()

    def clock(self, op: int, alternative: int) -> None:
        """Attribute the time since the last call to a compute; op -1 only restarts the clock."""
        now = self._now()
        if op >= 0:
            step = self._times.setdefault((op, alternative), [])
            while len(step) < self.steps:
                step.append([])
            if step:
                step[-1].append(now - self._last)
        self._last = self._now()

    @property
    def is_ready(self) -> bool:
        """Whether enough steps were timed; the first warms up and does not count."""
        return self.steps > TIMED_STEPS

    def tuned(self, graph: Graph) -> Graph:
        """Return the graph with in-step costs.

        Alternatives that never ran keep their isolated cost, scaled as the op's default is.
        """
        ops = tuple(self._tuned_op(op) for op in graph.ops)
        return msgspec.structs.replace(graph, ops=ops, cost_source="measured in steps")

    def _tuned_op(self, op: Op) -> Op:
        measured = {
            index: value
            for index in range(len(op.alternatives))
            if (value := self._median(op.id, index)) is not None
        }
        if 0 not in measured:
            return op
        before = min(v.cost_s for v in op.alternatives[0].variants)
        scale = measured[0] / before if before > 0 else 1.0
        alternatives = []
        for index, alternative in enumerate(op.alternatives):
            fastest = min(v.cost_s for v in alternative.variants)
            own = measured[index] / fastest if index in measured and fastest > 0 else scale
            variants = tuple(
                msgspec.structs.replace(v, cost_s=v.cost_s * own) for v in alternative.variants
            )
            alternatives.append(msgspec.structs.replace(alternative, variants=variants))
        return msgspec.structs.replace(op, alternatives=tuple(alternatives))

    def _median(self, op: int, alternative: int) -> float | None:
        steps = self._times.get((op, alternative), [])[1:]
        times = [t for step in steps for t in step]
        return statistics.median(times) if times else None
