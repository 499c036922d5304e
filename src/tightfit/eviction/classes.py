"""Classes of evicted storages: union-find with the paper's approximation of splitting.

Kirisame et al., section 4.1 and appendix C.2: a class carries the sum of its members' costs. A
storage that comes back takes its cost off and leaves; the class it held together stays one, so
sums may drift, even below zero.
"""

from __future__ import annotations

from collections.abc import Iterable


class Classes:
    """A forest of nodes, one for each storage that is not resident; counts nodes looked at."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._cost: list[float] = []
        self.looks = 0

    def add(self, cost: float) -> int:
        """Return a new node, a class of its own."""
        self._parent.append(len(self._parent))
        self._cost.append(cost)
        return len(self._parent) - 1

    def root(self, node: int) -> int:
        """Return the representative of a node's class."""
        self.looks += 1
        while self._parent[node] != node:
            self.looks += 1
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, first: int, second: int) -> None:
        """Make one class of two; costs add up."""
        first, second = self.root(first), self.root(second)
        if first != second:
            self._parent[second] = first
            self._cost[first] += self._cost[second]

    def leave(self, node: int, cost: float) -> None:
        """Take a cost off a node's class: the storage is no longer a member."""
        self._cost[self.root(node)] -= cost

    def cost(self, nodes: Iterable[int]) -> float:
        """Return the sum over the distinct classes of some nodes."""
        return sum(self._cost[root] for root in {self.root(node) for node in nodes})
