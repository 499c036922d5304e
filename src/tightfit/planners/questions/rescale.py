"""Plans and graphs of one batch size, carried over to another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tightfit.errors import PlanMismatch
from tightfit.graph.ir import Graph, Op, Variant
from tightfit.plan.plan import Outcome, Plan
from tightfit.planners.base import Task
from tightfit.planners.outcomes import finish


def rescaled(plan: Plan, graph: Graph, task: Task) -> Outcome:
    """Return the same computes on another graph of the same model, verified again.

    `plan`: made for `graph`. `task`: the same step with other sizes (another batch), and its budget
    in bytes. Raises `PlanMismatch` if the graphs differ in more than sizes and costs. Raises
    `InvalidPlan` if the plan does not stay within the task's budget.
    """
    started = time.perf_counter()
    if _structure(graph) != _structure(task.graph):
        raise PlanMismatch(
            f"a plan for {graph.name or 'one graph'!r} cannot be used for "
            f"{task.graph.name or 'the other'!r}: they differ in more than sizes; plan again"
        )
    return finish(task, plan.computes, started=started)


def extrapolated(small: Graph, large: Graph, batches: tuple[int, int]) -> Callable[[int], Graph]:
    """Return a function that estimates the graph of any batch size from two graphs.

    Bytes and costs are taken to grow linearly with the batch; bytes are rounded as the device's
    allocator rounds.

    `small`, `large`: the same step at the two batch sizes. `batches`: the two batch sizes,
    different. Raises `PlanMismatch` if the graphs differ in more than sizes and costs: the step
    depends on the batch size.
    """
    if _structure(small) != _structure(large):
        raise PlanMismatch(
            f"{small.name or 'the step'!r} is another graph at batch {batches[0]} than at batch "
            f"{batches[1]}: other batch sizes cannot be estimated from them"
        )
    return _Extrapolation(small, large, batches[0], batches[1] - batches[0]).graph_of


@dataclass(frozen=True)
class _Extrapolation:
    small: Graph
    large: Graph
    origin: int  # the batch of `small`
    apart: int  # by so much the batch of `large` is larger

    def graph_of(self, batch: int) -> Graph:
        small, large = self.small, self.large
        grain = small.device.granularity_bytes
        replace = msgspec.structs.replace
        return replace(
            small,
            values=tuple(
                replace(a, size_bytes=self._bytes(batch, a.size_bytes, b.size_bytes, grain))
                for a, b in zip(small.values, large.values, strict=True)
            ),
            ops=tuple(self._op(batch, a, b) for a, b in zip(small.ops, large.ops, strict=True)),
            segments=tuple(
                replace(a, outside_bytes=self._bytes(batch, a.outside_bytes, b.outside_bytes))
                for a, b in zip(small.segments, large.segments, strict=True)
            ),
            constants_bytes={
                kind: self._bytes(batch, size, large.constants_bytes.get(kind, size))
                for kind, size in small.constants_bytes.items()
            },
        )

    def _op(self, batch: int, a: Op, b: Op) -> Op:
        ways = tuple(
            msgspec.structs.replace(
                one,
                variants=tuple(
                    Variant(
                        cost_s=max(0.0, self._line(batch, x.cost_s, y.cost_s)),
                        workspace_bytes=self._bytes(batch, x.workspace_bytes, y.workspace_bytes),
                    )
                    for x, y in zip(one.variants, other.variants, strict=True)
                ),
            )
            for one, other in zip(a.alternatives, b.alternatives, strict=True)
        )
        return msgspec.structs.replace(a, alternatives=ways)

    def _line(self, batch: int, a: float, b: float) -> float:
        return a + (b - a) * (batch - self.origin) / self.apart

    def _bytes(self, batch: int, a: int, b: int, grain: int = 1) -> int:
        total = a * self.apart + (b - a) * (batch - self.origin)
        return max(0, -(-total // (self.apart * grain)) * grain)


def _structure(graph: Graph) -> object:
    """Parts that have to be equal: operators, their reads and writes, roles, segments."""
    return (
        [(v.role, v.fate, v.replaces, v.segment) for v in graph.values],
        [
            (
                op.target,
                op.segment,
                op.required,
                op.pinned is not None,
                [
                    (a.reads, a.writes, a.overwrites, a.use, len(a.variants))
                    for a in op.alternatives
                ],
            )
            for op in graph.ops
        ],
        [(s.phase, s.program) for s in graph.segments],
    )
