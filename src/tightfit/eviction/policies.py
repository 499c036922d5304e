"""Scores of eviction policies: the candidate with the lowest score is evicted.

Kirisame et al., Dynamic Tensor Rematerialization (2021), section 4.1 and appendix: a policy knows
a candidate's bytes, how long ago it was used, what it costs to compute again, and what the
evicted values around it cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

__all__ = ["POLICIES", "Candidate", "Policy"]


class Candidate(NamedTuple):
    """What a policy may know about a value that may be evicted.

    Parameters
    ----------
    size_bytes : int
        Bytes that eviction sets free.
    staleness_s : float
        Seconds of computation since it was last used.
    cost_s : float
        Seconds to compute it again from values at hand.
    evicted_before_s : callable
        Seconds of the evicted values that it would need first.
    evicted_around_s : callable
        The same, and of the evicted values that need it.
    """

    size_bytes: int
    staleness_s: float
    cost_s: float
    evicted_before_s: Callable[[], float]
    evicted_around_s: Callable[[], float]


Policy: TypeAlias = Callable[[Candidate], float]

_MOMENT_S = 1e-9


def _dtr(candidate: Candidate) -> float:
    """h_DTR: (c + cost of the evicted neighbourhood) / (bytes * staleness)."""
    cost = candidate.cost_s + candidate.evicted_around_s()
    return cost / (candidate.size_bytes * (candidate.staleness_s + _MOMENT_S))


def _dtr_local(candidate: Candidate) -> float:
    """h_DTR-local: c / (bytes * staleness)."""
    return candidate.cost_s / (candidate.size_bytes * (candidate.staleness_s + _MOMENT_S))


def _lru(candidate: Candidate) -> float:
    """h_LRU: the least recently used."""
    return -candidate.staleness_s


def _size(candidate: Candidate) -> float:
    """h_size: the largest."""
    return -float(candidate.size_bytes)


def _msps(candidate: Candidate) -> float:
    """h_MSPS: (c + cost of what must be computed before) / bytes (Peng et al., Capuchin)."""
    return (candidate.cost_s + candidate.evicted_before_s()) / candidate.size_bytes


POLICIES: dict[str, Policy] = {
    "dtr": _dtr,
    "dtr_local": _dtr_local,
    "lru": _lru,
    "size": _size,
    "msps": _msps,
}
"""Policies by name."""
