"""The variables of MONeT's program: s, r, and delta where an op has several implementations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

from tightfit.errors import BadInput
from tightfit.graph.ir import ValueId
from tightfit.planners.papers.monet.implementations import Implementations
from tightfit.planners.papers.stages.scale import CAPACITY_UNITS, Scaled
from tightfit.planners.papers.stages.schedule import last_uses, useful_until
from tightfit.planners.papers.stages.staged import Implementation, Staged
from tightfit.planners.solvers import ProgramBuilder

LocalBound = Literal["tight", "loose"]
"""Which bound on local memory (appendix B): of nodes that may still be recomputed, or of all."""


class Variables(Scaled):
    """The columns of the program and the sets its constraints speak of.

    `problem`: a forward pass followed by a backward pass. `implementations`: the ways to compute
    each node. `builder`: where the columns are added, and the constraints after them.
    `local_bound`: which bound on local memory to use. Raises `BadInput` if a forward node follows a
    backward one. `stored` (dict of (stage, value) to column): s: the forward value is stored when
    the stage begins. `recomputed` (dict of (stage, node) to column): r: the forward node is
    recomputed in the stage. `chosen` (dict of (stage, node, implementation) to column): delta: the
    node is computed so in the stage; only where there are several. `held` (dict of (stage, node) to
    column): bytes stored while the stage is about to reach the node (the sums of equation 13). Of
    nodes before it these are the bytes stored afterwards, of it and later nodes those stored
    before. `remaining` (dict of (stage, value) to column): p: the value is made in the stage and no
    implementation overwrites it there (appendix C.3). Only for values that some implementation may
    overwrite. `products` (dict of (column, column) to column): alpha: the product of two binaries
    (appendix C.4).
    """

    def __init__(
        self,
        problem: Staged,
        implementations: Implementations,
        builder: ProgramBuilder,
        local_bound: LocalBound = "tight",
    ) -> None:
        super().__init__(problem)
        self.implementations = implementations
        self.builder = builder
        self.local_bound: LocalBound = local_bound
        self.stored: dict[tuple[int, ValueId], int] = {}
        self.recomputed: dict[tuple[int, int], int] = {}
        self.chosen: dict[tuple[int, int, int], int] = {}
        self.held: dict[tuple[int, int], int] = {}
        self.remaining: dict[tuple[int, ValueId], int] = {}
        self.products: dict[tuple[int, int], int] = {}
        if any(node.is_forward for node in problem.nodes[self.forward :]):
            raise BadInput(
                "MONeT plans one forward pass followed by one backward pass; in this graph a "
                "forward op follows a backward op: use the default planner or checkmate"
            )
        self._add_stored()
        self._add_recomputed()
        self._add_chosen()
        self._add_remaining()
        self._add_constant()

    @cached_property
    def forward(self) -> int:
        nodes = self.problem.nodes
        return next((i for i, node in enumerate(nodes) if not node.is_forward), len(nodes))

    @cached_property
    def backward(self) -> int:
        """The number of backward nodes: one for each stage after the forward pass."""
        return len(self.problem.nodes) - self.forward

    def node_of(self, stage: int) -> int:
        """The backward node that a stage runs."""
        return self.forward + stage - 1

    @cached_property
    def forward_values(self) -> list[ValueId]:
        """The values forward nodes make, by producer."""
        made = [self.problem.nodes[node].first.writes for node in range(self.forward)]
        return [value for writes in made for value in writes]

    def producer(self, value: ValueId) -> int:
        producer = self.problem.values[value].producer
        assert producer is not None
        return producer

    def overwriting(self, stage: int, node: int) -> list[tuple[ValueId, int]]:
        """The values that implementations of a forward node overwrite in a stage, with their q.

        q is delta of the implementation, or r where it is the only one.
        """
        ways = self.implementations.ways(node, again=stage > 0)
        if len(ways) == 1 and stage == 0:
            return []  # a node always computed first in place is no node here (`staged` says so)
        return [
            (
                way.overwrites,
                self.chosen[stage, node, number] if len(ways) > 1 else self.recomputed[stage, node],
            )
            for number, way in enumerate(ways)
            if way.overwrites is not None
        ]

    def size(self, value: ValueId) -> float:
        """The bytes of a value in the program's unit."""
        return self.units(self.problem.values[value].size_bytes)

    def is_forced(self, stage: int, value: ValueId) -> bool:
        """Whether the value is kept when the stage begins."""
        stored = self.problem.values[value]
        return stored.begins <= self.forward + stage - 1 < stored.forced_until

    def inputs(self, way: Implementation) -> list[ValueId]:
        """The forward values an implementation reads (N of a forward node, D of a backward one)."""
        made = self._forward_set
        return [value for value in way.reads if value in made]

    @cached_property
    def _forward_set(self) -> frozenset[ValueId]:
        return frozenset(self.forward_values)

    @cached_property
    def gradients(self) -> list[float]:
        """For each stage, units of backward values and tangents alive, without its results."""
        values = self.problem.values
        last = dict.fromkeys(values, -1)
        for node in range(self.forward, len(self.problem.nodes)):
            for way in self.implementations.first[node]:
                for value in way.reads:
                    last[value] = node
        alive = [0.0] * (self.backward + 1)
        for value, stored in values.items():
            if value in self._forward_set:
                continue
            end = min(max(last[value] + 1, stored.forced_until), stored.ends)
            for node in range(max(stored.begins, self.forward), min(end, len(self.problem.nodes))):
                alive[node - self.forward + 1] += self.size(value)
        return alive

    def local(self, stage: int, node: int) -> list[ValueId]:
        """The values made before a forward node that it or later ones read (appendix B).

        In the forward pass: all later nodes. In a recomputation: all later ones (loose), or
        those that this or a later stage can still need recomputed (tight).
        """
        limit = self.forward
        if stage > 0 and self.local_bound == "tight":
            limit = self.deepest[stage] + 1
        values = self.problem.values
        found = dict.fromkeys(
            value
            for reader, value in self._forward_reads
            if node <= reader < limit and (values[value].producer or 0) < node
        )
        return list(found)

    @cached_property
    def _forward_reads(self) -> list[tuple[int, ValueId]]:
        """All (forward node, forward value it reads), first or again."""
        pairs: dict[tuple[int, ValueId], None] = {}
        for node in range(self.forward):
            ways = (*self.implementations.first[node], *self.implementations.again[node])
            for way in ways:
                for value in self.inputs(way):
                    pairs[node, value] = None
        return list(pairs)

    @cached_property
    def deepest(self) -> list[int]:
        """For each stage, the last forward node that can be of use in it (-1: none)."""
        deepest = [-1] * (self.backward + 1)
        for stage, node in self._useful_recomputations():
            deepest[stage] = max(deepest[stage], node)
        return deepest

    def _useful_recomputations(self) -> Iterator[tuple[int, int]]:
        """Yield every (stage, forward node) for which a recomputation can be of use."""
        last = last_uses(self.problem, forward_again=True)
        for node in range(self.forward):
            again = self.problem.nodes[node].again
            if again is None:
                continue
            useful = useful_until(self.problem, again, last)
            for stage in range(1, self.backward + 1):
                frontier = self.node_of(stage)
                if frontier <= useful and self.problem.may_recompute(node, frontier):
                    yield stage, node

    def add_held(self, stage: int, node: int) -> int:
        """Add the running sum of stored bytes while a stage is about to reach a node."""
        room = CAPACITY_UNITS - self.gradients[stage]
        self.held[stage, node] = self.builder.real(lower=0.0, upper=room)
        return self.held[stage, node]

    def pass_held(self, stage: int, node: int) -> None:
        """Take the running sum of the node before: nothing changes from there to this node."""
        self.held[stage, node] = self.held[stage, node - 1]

    def add_product(self, first: int, second: int) -> int:
        """Add a column that constraints are to make the product of two binaries."""
        self.products[first, second] = self.builder.binary()
        return self.products[first, second]

    def _add_stored(self) -> None:
        last = last_uses(self.problem, forward_again=True)
        for value in self.forward_values:
            ends = self.problem.values[value].ends
            for stage in range(1, self.backward + 2):
                forced = self.is_forced(stage, value)
                frontier = self.node_of(stage)
                if forced or frontier <= min(last[value], ends - 1):
                    self.stored[stage, value] = self.builder.binary(lower=float(forced))

    def _add_recomputed(self) -> None:
        for stage, node in self._useful_recomputations():
            ways = self.implementations.again[node]
            cost = self.cost(ways[0].cost_s) if len(ways) == 1 else 0.0
            self.recomputed[stage, node] = self.builder.binary(cost=cost)

    def _add_chosen(self) -> None:
        first = [
            (max(0, node - self.forward + 1), node, ways)
            for node, ways in enumerate(self.implementations.first)
        ]
        again = [(stage, node, self.implementations.again[node]) for stage, node in self.recomputed]
        for stage, node, ways in (*first, *again):
            for number, way in enumerate(ways if len(ways) > 1 else ()):
                column = self.builder.binary(cost=self.cost(way.cost_s))
                self.chosen[stage, node, number] = column

    def _add_remaining(self) -> None:
        for stage, node in self.recomputed:
            for value, _ in self.overwriting(stage, node):
                made = (stage, self.problem.values[value].producer) in self.recomputed
                if made and (stage, value) not in self.remaining:
                    self.remaining[stage, value] = self.builder.binary()

    def _add_constant(self) -> None:
        """Add the cost of nodes computed once and in one way as a column that is always 1."""
        once = sum(ways[0].cost_s for ways in self.implementations.first if len(ways) == 1)
        self.builder.real(lower=1.0, upper=1.0, cost=self.cost(once))
