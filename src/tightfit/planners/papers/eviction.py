"""Online eviction policies run over a static graph: the schedule of DTR as a plan.

The ops run in their fixed order; a missing input is computed again at once, and when memory is full
the policy says which value goes. The policy sees no future, except that a value without further
readers is dropped (DTR's eager eviction) and that values that must stay are never candidates.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from tightfit.eviction.classes import Classes
from tightfit.eviction.policies.policy import Cost, Policy, cost_of
from tightfit.eviction.policies.registry import policy_named
from tightfit.graph.ir import ValueId
from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import finish, no_plan, simulated
from tightfit.planners.papers.stages.easy import begin
from tightfit.planners.papers.stages.schedule import last_uses, without_waste
from tightfit.planners.papers.stages.staged import Implementation, Staged
from tightfit.progress import Progress

_THRASH = 10.0
"""Give up once recomputation has cost this many steps."""

_MOMENT_S = 1e-9
"""The staleness of a value used just now, so that scores differ."""


def plan_eviction(task: Task, limits: Limits, progress: Progress, option: str = "h_dtr") -> Outcome:
    """Run a policy of `tightfit.eviction.policies` over the graph; the bound is the trivial one.

    Only its score counts here: views are no ops of a graph, values that will not be read are
    dropped.
    """
    started, problem, easy = begin(task, limits)
    if easy is not None:
        return easy
    run = _Run(problem, policy_named(option), started + limits.seconds, progress)
    progress.start(f"eviction by {option}", len(problem.nodes))
    try:
        why = run.steps()
    except KeyboardInterrupt:
        why = "interrupted"
    finally:
        progress.stop()
    if why:
        return no_plan(started=started, proven=False, note=why)
    computes = without_waste(problem, run.computes)
    if simulated(task, computes).peak_bytes > task.budget_bytes:
        computes = run.computes
    return finish(task, computes, started=started, gap=limits.gap)


@dataclass(frozen=True)
class _Candidate:
    """A policy's view of a value; costs and staleness in seconds."""

    run: _Run
    value: ValueId

    @property
    def size_bytes(self) -> int:
        return self.run.problem.values[self.value].size_bytes

    @property
    def staleness(self) -> float:
        return self.run.clock_s - self.run.resident[self.value] + _MOMENT_S

    def cost(self, kind: Cost) -> float:
        return cost_of(kind, self.run, self.value)


class _Run:
    """One run of a step under a policy.

    `deadline`: `time.perf_counter` at which to give up.
    """

    def __init__(
        self, problem: Staged, policy: Policy, deadline: float, progress: Progress
    ) -> None:
        self.problem = problem
        self.policy = policy
        self.deadline = deadline
        self.progress = progress
        self.computes: list[Compute] = []
        self.clock_s = 0.0
        self.resident: dict[ValueId, float] = {}  # when it was last used
        self.live_bytes = 0
        self.stage = 0
        self.last_read = dict.fromkeys(problem.values, -1)
        for stage, node in enumerate(problem.nodes):
            for value in node.first.reads:
                self.last_read[value] = stage
        self.last_use = last_uses(problem)
        self.readers: dict[ValueId, list[int]] = {value: [] for value in problem.values}
        for index, node in enumerate(problem.nodes):
            for value in node.again.reads if node.again is not None else ():
                self.readers[value].append(index)
        self.made: set[ValueId] = set()
        self.classes = Classes()
        self.nodes: dict[ValueId, int] = {}  # of evicted values among the classes

    def steps(self) -> str:
        """Run all ops; return why it failed, or nothing."""
        crossings = {crossing.stage: crossing for crossing in self.problem.crossings}
        for stage in range(len(self.problem.nodes)):
            self.stage = stage
            for value in [v for v in self.resident if self.problem.values[v].ends == stage]:
                self._drop(value)
            crossing = crossings.get(stage)
            if crossing is not None:
                needed = max(crossing.outside_bytes, self.problem.size(crossing.tangents))
                if not self._make_room(needed, frozenset()):
                    return f"no value is left to evict where stage {stage} is entered"
                for value in crossing.tangents:
                    self._add(value)
            why = self._reach(stage)
            if why:
                return why
            self.progress.update(stage + 1)
        return ""

    def _reach(self, frontier: int) -> str:
        """Compute a node for the first time, and before it all values that it lacks."""
        pending = [frontier]
        while pending:
            node = pending[-1]
            way = self.problem.nodes[node].implementation(node == frontier)
            missing = next((v for v in way.reads if v not in self.resident), None)
            if missing is not None:
                producer = self.problem.values[missing].producer
                assert producer is not None
                pending.append(producer)
                continue
            nodes = self.problem.nodes
            locked = frozenset(
                v for n in pending for v in nodes[n].implementation(n == frontier).reads
            )
            made = self.problem.size(way.writes) + way.workspace_bytes
            if not self._make_room(made, locked):
                return f"no value is left to evict before op {way.compute.op}"
            self._compute(way)
            pending.pop()
            waiting_for = locked if pending else frozenset[ValueId]()
            self._drop_unread(frontier if pending else frontier + 1, waiting_for)
            if self.clock_s > _THRASH * self.problem.base_cost_s:
                return f"thrashing: more than {_THRASH:g} times the step's cost"
            if time.perf_counter() > self.deadline:
                return "time is up"
        return ""

    def _compute(self, way: Implementation) -> None:
        self.computes.append(way.compute)
        self.clock_s += way.cost_s
        for value in way.writes:
            if value not in self.resident and self._may_be_added(value):
                self._add(value)
        for value in way.reads:
            self.resident[value] = self.clock_s

    def _may_be_added(self, value: ValueId) -> bool:
        """A value that stays from its first computation is not made again by another."""
        if value in self.made and not self.problem.values[value].recoverable:
            return False
        self.made.add(value)
        return True

    def _add(self, value: ValueId) -> None:
        self.resident[value] = self.clock_s
        self.live_bytes += self.problem.values[value].size_bytes
        if value in self.nodes:
            self.classes.leave(self.nodes.pop(value), self.own_cost(value))

    def _drop(self, value: ValueId) -> None:
        del self.resident[value]
        self.live_bytes -= self.problem.values[value].size_bytes
        if self.policy.cost is Cost.CLASSES and value in self.made:
            self.nodes[value] = self.classes.add(self.own_cost(value))
            for node in self._adjacent_nodes(value):
                self.classes.join(self.nodes[value], node)

    def _drop_unread(self, frontier: int, locked: frozenset[ValueId]) -> None:
        """Drop values that no first computation from `frontier` on reads and that need not stay."""
        for value in [v for v in self.resident if v not in locked]:
            stored = self.problem.values[value]
            needed = self.last_read[value] if stored.recoverable else self.last_use[value]
            if needed < frontier and stored.forced_until <= self.stage + 1:
                self._drop(value)

    def _make_room(self, needed: int, locked: frozenset[ValueId]) -> bool:
        """Evict by the policy until `needed` more bytes fit; False if nothing is left."""
        while self.live_bytes + needed > self.problem.capacity_bytes:
            candidates = [v for v in self.resident if v not in locked and self._evictable(v)]
            if not candidates:
                return False
            scores = ((self.policy.score(_Candidate(self, value)), value) for value in candidates)
            self._drop(min(scores)[1])
        return True

    def _evictable(self, value: ValueId) -> bool:
        stored = self.problem.values[value]
        return (
            stored.size_bytes > 0
            and stored.recoverable
            and stored.producer is not None
            and self.problem.may_recompute(stored.producer, self.stage)
        )

    # -- terms of a score ------------------------------------------------------------------------

    def own_cost(self, value: ValueId) -> float:
        """Return the seconds of the op that makes a value, computed again."""
        producer = self.problem.values[value].producer
        again = None if producer is None else self.problem.nodes[producer].again
        return 0.0 if again is None else again.cost_s

    def costs_before(self, value: ValueId) -> Collection[float]:
        """Return the seconds of the evicted nodes that a value needs."""
        return self._evicted(value, forward=False).values()

    def costs_after(self, value: ValueId) -> Collection[float]:
        """Return the seconds of the evicted nodes that need a value."""
        return self._evicted(value, forward=True).values()

    def cost_of_classes(self, value: ValueId) -> float:
        """Return the sum of the classes of evicted values next to it."""
        return self.classes.cost(self._adjacent_nodes(value))

    def cost_of_operators(self, value: ValueId) -> float:
        """Return its cost with all it needs first: a node computes its values at once."""
        return cost_of(Cost.BEFORE, self, value)

    def _adjacent_nodes(self, value: ValueId) -> list[int]:
        """The classes of the evicted values that a value needs or that need it."""
        adjacent = [*self._neighbours(value, forward=False), *self._neighbours(value, forward=True)]
        ways = (self.problem.nodes[node].again for node in adjacent)
        values = [v for way in ways if way is not None for v in way.writes]
        return [self.nodes[v] for v in values if v in self.nodes and v != value]

    def _evicted(self, value: ValueId, *, forward: bool) -> dict[int, float]:
        """The evicted nodes that a value needs, or (forward) that need it, and their seconds."""
        found: dict[int, float] = {}
        pending = [value]
        while pending:
            for node in self._neighbours(pending.pop(), forward=forward):
                again = self.problem.nodes[node].again
                if node in found or again is None:
                    continue
                evicted = [v for v in again.writes if v in self.made and v not in self.resident]
                if evicted:
                    found[node] = again.cost_s
                    pending.extend(evicted)
        return found

    def _neighbours(self, value: ValueId, *, forward: bool) -> list[int]:
        if forward:
            return self.readers[value]
        producer = self.problem.values[value].producer
        again = None if producer is None else self.problem.nodes[producer].again
        if again is None:
            return []
        producers = [self.problem.values[v].producer for v in again.reads]
        return [node for node in producers if node is not None]
