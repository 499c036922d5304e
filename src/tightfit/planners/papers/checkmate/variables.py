"""The variables of Checkmate's program: R, S, FREE and U.

Variables that no optimal schedule needs are left out: recomputations and residency after a value's
last possible use, and all of zero-byte values. So is FREE after the last node of a stage, and where
a later reader or the next stage surely holds the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tightfit.graph.ir import ValueId
from tightfit.planners.papers.stages.scale import CAPACITY_UNITS, Scaled
from tightfit.planners.papers.stages.schedule import last_uses, useful_until
from tightfit.planners.papers.stages.staged import Implementation, Stage, Staged
from tightfit.planners.solvers import ProgramBuilder


def frontier_stages(problem: Staged) -> tuple[Stage, ...]:
    """Return one stage per node, each advancing the frontier (section 4.2)."""
    return tuple(Stage(limit=node, first=node) for node in range(len(problem.nodes)))


def split_stages(problem: Staged) -> tuple[Stage, ...]:
    """Return two stages per backward node, so that a value can be computed twice (section 4.10)."""
    stages: list[Stage] = []
    for index, node in enumerate(problem.nodes):
        if not node.is_forward:
            stages.append(Stage(limit=index, first=None))
        stages.append(Stage(limit=index, first=index))
    return tuple(stages)


class Variables(Scaled):
    """The columns of the program over a list of stages.

    `stages`: rows of R and S. `builder`: where the columns are added, and the constraints after
    them. `computed` (dict of (stage, node) to column): R: the node is computed in the stage.
    `resident` (dict of (stage, value) to column): S: the value is resident when the stage begins;
    stage ``len(stages)`` is the end. `freed` (dict of (stage, value, node) to column): FREE: the
    value is freed right after the node in the stage. After its own node only if that makes several
    values (the paper has one per node): this value is not needed, or it is resident and the second
    instance goes. `used` (dict of (stage, node) to column): U: memory while the node is computed in
    the stage, in units of 1/1000 of the capacity.
    """

    def __init__(self, problem: Staged, stages: Sequence[Stage], builder: ProgramBuilder) -> None:
        super().__init__(problem)
        self.stages = stages
        # Nodes below which may run again in each stage; all of them at the end
        self.limits = [*(stage.limit for stage in stages), len(problem.nodes)]
        self.builder = builder
        self.computed: dict[tuple[int, int], int] = {}
        self.resident: dict[tuple[int, ValueId], int] = {}
        self.freed: dict[tuple[int, ValueId, int], int] = {}
        self.used: dict[tuple[int, int], int] = {}
        self._add_computed()
        self._add_resident()
        for stage in range(len(stages)):
            self._add_freed(stage)
            self._add_used(stage)

    def implementation(self, stage: int, node: int) -> Implementation:
        """How a node is computed in a stage: its first way at the frontier, else again."""
        return self.problem.nodes[node].implementation(self.stages[stage].first == node)

    @cached_property
    def nodes(self) -> list[list[int]]:
        """For each stage, the nodes that may be computed in it, in order."""
        nodes: list[list[int]] = [[] for _ in self.stages]
        for stage, node in self.computed:
            nodes[stage].append(node)
        return nodes

    @cached_property
    def readers(self) -> list[dict[ValueId, list[int]]]:
        """For each stage, the nodes that may read each value in it, in order."""
        readers: list[dict[ValueId, list[int]]] = [{} for _ in self.stages]
        for stage, node in self.computed:
            for value in self.implementation(stage, node).reads:
                readers[stage].setdefault(value, []).append(node)
        return readers

    @cached_property
    def frees(self) -> list[dict[ValueId, list[tuple[int, int]]]]:
        """For each stage and value, the nodes after which an instance may go, with the columns."""
        frees: list[dict[ValueId, list[tuple[int, int]]]] = [{} for _ in self.stages]
        for (stage, value, node), column in self.freed.items():
            frees[stage].setdefault(value, []).append((node, column))
        return frees

    def writer(self, stage: int, value: ValueId) -> int | None:
        """The column of R that writes an instance of the value in the stage, if any."""
        producer = self.problem.values[value].producer
        if producer is None or (stage, producer) not in self.computed:
            return None
        written = value in self.implementation(stage, producer).writes
        return self.computed[stage, producer] if written else None

    def source(self, stage: int, value: ValueId) -> int | None:
        """The column of R that makes the value for later readers in the stage, if any."""
        producer = self.problem.values[value].producer
        if producer is None:
            return None
        makes = self.problem.makes(producer, self.stages[stage].first == producer, value)
        return self.writer(stage, value) if makes else None

    def hazards(self, stage: int, value: ValueId, node: int) -> list[int]:
        """The columns that forbid freeing: S of the next stage and R of later readers (5)."""
        later = [
            self.computed[stage, reader]
            for reader in self.readers[stage].get(value, ())
            if reader > node
        ]
        following = self.resident.get((stage + 1, value))
        return later if following is None else [*later, following]

    def _add_computed(self) -> None:
        last = last_uses(self.problem)
        for stage, kind in enumerate(self.stages):
            for node in range(kind.limit):
                again = self.problem.nodes[node].again
                if again is None or not self.problem.may_recompute(node, kind.limit):
                    continue
                if useful_until(self.problem, again, last) >= kind.limit:
                    cost = self.cost(again.cost_s)
                    self.computed[stage, node] = self.builder.binary(cost=cost)
            if kind.first is not None:
                cost = self.cost(self.problem.nodes[kind.first].first.cost_s)
                self.computed[stage, kind.first] = self.builder.binary(lower=1.0, cost=cost)

    def _add_resident(self) -> None:
        last = last_uses(self.problem)
        for value, stored in self.problem.values.items():
            for stage, limit in enumerate(self.limits):
                forced = self.is_forced(stage, value)
                possible = stored.begins <= limit < stored.ends and limit <= last[value]
                if forced or possible:
                    self.resident[stage, value] = self.builder.binary(lower=float(forced))

    def _add_freed(self, stage: int) -> None:
        first = self.stages[stage].first
        frontier = () if first is None else self.implementation(stage, first).reads
        for node in self.nodes[stage][:-1]:
            way = self.implementation(stage, node)
            made = way.writes if len(way.writes) > 1 else ()
            for value in dict.fromkeys((*way.reads, *made)):
                stored = self.problem.values[value]
                needed = value in frontier or self.is_forced(stage + 1, value)
                needed = needed or stored.ends == stored.forced_until
                second = value in made and (stage, value) in self.resident
                if stored.size_bytes and (second or not needed):
                    self.freed[stage, value, node] = self.builder.binary()

    @cached_property
    def forced(self) -> list[list[tuple[ValueId, int]]]:
        """For each stage and the end, the values that are kept then, with their columns."""
        forced: list[list[tuple[ValueId, int]]] = [[] for _ in range(len(self.stages) + 1)]
        for (stage, value), column in self.resident.items():
            if self.is_forced(stage, value):
                forced[stage].append((value, column))
        return forced

    def is_forced(self, stage: int, value: ValueId) -> bool:
        """Whether the value is surely resident when the stage begins."""
        stored = self.problem.values[value]
        return stored.begins <= self.limits[stage] < stored.forced_until

    def _add_used(self, stage: int) -> None:
        for node in self.nodes[stage]:
            self.used[stage, node] = self.builder.real(lower=0.0, upper=CAPACITY_UNITS)
