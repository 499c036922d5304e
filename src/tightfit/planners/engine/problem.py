"""A task as the engine sees it, and an engine's schedule as computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tightfit._core import _engine
from tightfit.graph.ir import Exactness, OpId, SegmentId, ValueId
from tightfit.plan.plan import Compute

CROSSING = -1
"""Instead of the number of a graph's op, where the engine's op is a segment crossing."""


@dataclass(frozen=True)
class EngineAlternative:
    """A way to compute an op, in the engine's numbers, for the mathematical programs."""

    # reads, writes: values of the engine, without the states of random generators
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    # Cost and workspace in bytes of its variants, the cheapest first; each later variant needs
    # fewer bytes. Workspace is negative by the bytes it may write in place
    options: tuple[tuple[int, int], ...]
    # first, again: whether it may serve the first computation, and later ones
    first: bool
    again: bool

    @property
    def cost(self) -> int:
        """The least cost of its variants."""
        return self.options[0][0]

    @property
    def workspace_bytes(self) -> int:
        """The least workspace of its variants."""
        return self.options[-1][1]


@dataclass(frozen=True)
class EngineProblem:
    """A task in the engine's numbers."""

    engine: _engine.Problem  # the problem itself
    budget_bytes: int  # the task's budget without the constants
    # For each op of the engine the op of the graph, `CROSSING` for a segment crossing
    graph_ops: tuple[OpId, ...]
    engine_ops: Mapping[OpId, int]  # the engine's op for each op of the graph
    # The engine's value for each value of the graph that is not constant
    engine_values: Mapping[ValueId, int]
    cost_unit_s: float  # seconds of one unit of cost
    baseline_cost: int  # units of cost with nothing recomputed and default alternatives
    # sizes, producers, kept_until: per value of the engine: bytes, the op that makes it, the last
    # stage at whose start it is always resident (-1: none)
    sizes: tuple[int, ...]
    producers: tuple[int, ...]
    kept_until: tuple[int, ...]
    alternatives: tuple[tuple[EngineAlternative, ...], ...]  # per op of the engine, in its order
    required: tuple[bool, ...]  # per op: whether it runs even if its results are not read
    programs: tuple[int, ...]  # per op: its program, -1 for a crossing
    segments: tuple[SegmentId, ...]  # per op: its segment
    segment_programs: tuple[int, ...]  # per segment of the graph: its program
    # Linked alternatives: choices of branches of (op, alternative of the engine)
    choices: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    # The least exact class that first computations may take; None: defaults only
    exactness: Exactness | None

    def overhead(self, cost: int) -> float:
        """Return a cost of the engine as a fraction above the baseline."""
        return cost / self.baseline_cost - 1.0 if self.baseline_cost else 0.0

    def cost_at(self, overhead: float) -> int:
        """Return the engine's cost of an overhead (a fraction)."""
        return int(self.baseline_cost * (1.0 + overhead))


def computes_of(problem: EngineProblem, schedule: Iterable[tuple[int, int, int]]) -> list[Compute]:
    """Return the computes of the graph; `schedule`: op of the engine, alternative and variant."""
    return [
        Compute(problem.graph_ops[op], alternative, variant)
        for op, alternative, variant in schedule
        if problem.graph_ops[op] != CROSSING
    ]
