"""The terms of costs in a replay: evicted neighbours, and operators to run first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from support.reference.state import Ledger, Stored
from tightfit.eviction.classes import Classes


class StoredTerms:
    """Looks at storages by their numbers, and counts how many it looks at.

    `ledger`: where looks are counted.
    """

    def __init__(self, stored: Mapping[int, Stored], classes: Classes, ledger: Ledger) -> None:
        self._stored = stored
        self._classes = classes
        self._ledger = ledger

    def own_cost(self, number: int) -> int:
        return self._stored[number].cost_ns

    def costs_before(self, number: int) -> list[int]:
        return [self.own_cost(n) for n in self._region(number, parents=True)]

    def costs_after(self, number: int) -> list[int]:
        return [self.own_cost(n) for n in self._region(number, parents=False)]

    def cost_of_classes(self, number: int) -> float:
        return self._classes.cost(self.adjacent_nodes(number))

    def cost_of_operators(self, number: int) -> int:
        operators = dict(self._stored[number].operators)
        for n in self._region(number, parents=True):
            operators |= self._stored[n].operators
        return sum(operators.values())

    def adjacent_nodes(self, number: int) -> Iterator[int]:
        """Yield the nodes of the neighbours that are not resident."""
        for n in (*self._stored[number].parents, *self._stored[number].children):
            self._ledger.count("looks")
            if not self._stored[n].is_resident:
                yield self._stored[n].node

    def _region(self, number: int, *, parents: bool) -> list[int]:
        """The evicted storages reached through evicted ones only."""
        found: dict[int, None] = {}
        front = [number]
        while front:
            stored = self._stored[front.pop()]
            for n in stored.parents if parents else stored.children:
                self._ledger.count("looks")
                if self._stored[n].is_evicted and n not in found:
                    found[n] = None
                    front.append(n)
        return list(found)
