"""The interface of a policy, its view of a candidate, and the formula of costs and scores.

Kirisame et al., Dynamic Tensor Rematerialization (2021), section 4.1 and appendix D.1. The storage
with the least ``cost / (bytes * staleness)`` is evicted, and any of the three may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

_Storage = TypeVar("_Storage", contravariant=True)


class Cost(IntEnum):
    """The cost in the numerator of a score."""

    NONE = 0
    """The same for every storage: 1."""
    LOCAL = 1
    """The storage's own cost."""
    BEFORE = 2
    """Its own cost, and the costs of all evicted storages that it would need first."""
    AROUND = 3
    """The same, and the costs of evicted storages that need it first: its neighbourhood."""
    COUNT = 4
    """One, and one for each storage of the evicted neighbourhood."""
    CLASSES = 5
    """Its own cost, and the costs of the classes of evicted storages next to it (union-find)."""
    OPERATORS = 6
    """The costs of its operator and of all operators that would have to run first, each once."""
    RANDOM = 7
    """There is no score: any candidate may go."""


class Terms(Protocol[_Storage]):
    """The terms of costs, wherever storages are evicted: each cost in one unit."""

    def own_cost(self, storage: _Storage, /) -> float:
        """Return the cost of computing a storage again by itself."""
        ...

    def costs_before(self, storage: _Storage, /) -> Collection[float]:
        """Return the own cost of each evicted storage that it would need first."""
        ...

    def costs_after(self, storage: _Storage, /) -> Collection[float]:
        """Return the own cost of each evicted storage that needs it first."""
        ...

    def cost_of_classes(self, storage: _Storage, /) -> float:
        """Return the sum of the classes of evicted storages next to it."""
        ...

    def cost_of_operators(self, storage: _Storage, /) -> float:
        """Return the cost of all operators that would have to run, each once."""
        ...


def cost_of(kind: Cost, terms: Terms[_Storage], storage: _Storage) -> float:
    """Return a storage's cost of one kind, as of now."""
    match kind:
        case Cost.NONE | Cost.RANDOM:
            return 1
        case Cost.LOCAL:
            return terms.own_cost(storage)
        case Cost.BEFORE:
            return terms.own_cost(storage) + sum(terms.costs_before(storage))
        case Cost.AROUND:
            around = sum(terms.costs_before(storage)) + sum(terms.costs_after(storage))
            return terms.own_cost(storage) + around
        case Cost.COUNT:
            return 1 + len(terms.costs_before(storage)) + len(terms.costs_after(storage))
        case Cost.CLASSES:
            return terms.own_cost(storage) + terms.cost_of_classes(storage)
        case Cost.OPERATORS:
            return terms.cost_of_operators(storage)


class Candidate(Protocol):
    """Facts for a policy about a storage that may be evicted; costs and staleness in one unit."""

    @property
    def size_bytes(self) -> int:
        """Bytes that eviction sets free."""
        ...

    @property
    def staleness(self) -> float:
        """Time computed since it was last used."""
        ...

    def cost(self, kind: Cost) -> float:
        """Return the storage's `Cost`, as of now."""
        ...


@dataclass(frozen=True)
class Policy:
    """A way to choose storages to evict."""

    name: str  # as users write it
    cost: Cost  # which costs its score counts
    # by_size, by_staleness: whether the score is divided by the bytes, and by the time since the
    # last use
    by_size: bool = True
    by_staleness: bool = True
    # A view of a storage that came back is an operator of its own, with a cost, that has to run
    # again before the view is used. False: views belong to their storage and cost nothing.
    views_run_again: bool = True
    # A storage that is not held, brought back because another needed it, stays until it is evicted
    # by its score. False: it goes as soon as the operator it was brought back for has run.
    keeps_dead: bool = True
    # Storages made in the backward pass are candidates only when no other is left
    backward_last: bool = False

    def score(self, candidate: Candidate) -> float:
        """Return the score; the candidate with the least is evicted."""
        staleness = candidate.staleness if self.by_staleness else 1.0
        weight = self.weight_of(candidate.size_bytes, staleness)
        return float(candidate.cost(self.cost)) / weight if weight > 0 else math.inf

    def weight_of(self, size_bytes: int, staleness: float) -> float:
        """Return the divisor of the cost."""
        weight = float(size_bytes) if self.by_size else 1.0
        return weight * staleness if self.by_staleness else weight
