"""The state of a replay: its storages, the clock, and the counters."""

from __future__ import annotations

from collections import Counter

from tightfit.eviction.replayed import Moment, MomentKind, Replayed, Status


class Stopped(Exception):
    """The replay cannot go on."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status: Status = status


class Stored:
    """A storage as it is now.

    `size_bytes`: its bytes. `node`: its node among the classes of evicted storages; it has one
    while it is not resident. `is_backward`: whether it was first made in the backward pass.
    """

    def __init__(self, size_bytes: int, node: int, is_backward: bool) -> None:
        self.size_bytes = size_bytes
        self.node = node
        self.is_backward = is_backward
        self.is_resident = self.was_resident = self.is_pinned = self.is_banished = False
        self.locks = self.holders = self.last_access_ns = 0
        self.operators: dict[int, int] = {}  # that make its tensors, and their costs
        self.parents: dict[int, None] = {}
        self.children: dict[int, None] = {}
        self.defined: set[int] = set()

    @property
    def cost_ns(self) -> int:
        return sum(self.operators.values())

    @property
    def is_evicted(self) -> bool:
        return self.was_resident and not self.is_resident

    @property
    def is_dead(self) -> bool:
        return self.holders == 0 and not self.is_banished

    def add_operator(self, operator: int, cost_ns: int) -> None:
        self.operators[operator] = cost_ns

    def add_parent(self, parent: int) -> None:
        self.parents[parent] = None

    def add_child(self, child: int) -> None:
        self.children[child] = None

    def forget(self, neighbour: int) -> None:
        self.parents.pop(neighbour, None)
        self.children.pop(neighbour, None)

    def touch(self, clock_ns: int) -> None:
        self.last_access_ns = clock_ns

    def lock(self, locks: int) -> None:
        self.locks += locks

    def hold(self, holders: int) -> None:
        self.holders += holders

    def pin(self) -> None:
        self.is_pinned = True

    def banish(self) -> None:
        self.is_banished = True
        self.is_pinned = False

    def define(self, tensor: int) -> None:
        self.is_resident = self.was_resident = True
        self.defined.add(tensor)

    def leave(self, node: int) -> None:
        self.is_resident = False
        self.defined.clear()
        self.node = node


class Ledger:
    """The clock, and all that is counted.

    `most_again_ns`: nanoseconds that recomputation may cost.
    """

    def __init__(self, budget_bytes: int, most_again_ns: int) -> None:
        self.budget_bytes = budget_bytes
        self.most_again_ns = most_again_ns
        self.clock_ns = 1
        self.again_ns = 0
        self.memory_bytes = self.max_memory_bytes = 0
        self.counts: Counter[str] = Counter()
        self.max_depth = 0
        self.moments: list[Moment] = []

    def fits(self, needed_bytes: int) -> bool:
        return self.memory_bytes + needed_bytes <= self.budget_bytes

    def allocate(self, size_bytes: int) -> None:
        self.memory_bytes += size_bytes
        self.max_memory_bytes = max(self.max_memory_bytes, self.memory_bytes)

    def free(self, size_bytes: int) -> None:
        self.memory_bytes -= size_bytes

    def compute(self, cost_ns: int, *, again: bool) -> None:
        self.clock_ns += cost_ns
        if again:
            self.again_ns += cost_ns
            self.count("rematerialisations")

    def enter(self, depth: int) -> None:
        self.max_depth = max(self.max_depth, depth)

    def count(self, counter: str, times: int = 1) -> None:
        self.counts[counter] += times

    def note(self, kind: MomentKind, operator: int, tensor: int) -> None:
        self.moments.append(Moment(kind, self.clock_ns, operator, tensor, self.memory_bytes))

    def stop_if_thrashing(self) -> None:
        if self.again_ns > self.most_again_ns:
            raise Stopped("thrash")

    def found(self, status: Status, *, looks: int) -> Replayed:
        return Replayed(
            status=status,
            budget_bytes=self.budget_bytes,
            max_memory_bytes=self.max_memory_bytes,
            total_cost_ns=self.clock_ns - 1,
            evictions_pressure=self.counts["evict"],
            evictions_eager=self.counts["evict_eager"],
            rematerialisations=self.counts["rematerialisations"],
            rematerialised_outputs=self.counts["outputs"],
            evaluations=self.counts["evaluations"],
            accesses=self.counts["evaluations"] + self.counts["looks"] + looks,
            max_depth=self.max_depth,
            moments=tuple(self.moments),
        )
