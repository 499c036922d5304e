"""The ablation of appendix D.1: every measure of cost, with and without bytes and staleness.

Names say what is kept: ``cost=around,size,staleness`` is h_DTR, ``cost=none,staleness`` h_LRU.
"""

from __future__ import annotations

from tightfit.eviction.policies.policy import Cost, Policy

__all__ = ["ABLATION", "FIGURES"]

FIGURES = {7: Cost.AROUND, 8: Cost.CLASSES, 9: Cost.LOCAL, 10: Cost.NONE}
"""The measure of cost that each figure of the paper holds fixed."""


def _policy(cost: Cost, by_size: bool, by_staleness: bool) -> Policy:
    kept = [f"cost={cost.name.lower()}", *["size"] * by_size, *["staleness"] * by_staleness]
    name = ",".join(kept)
    return Policy(name, cost, by_size, by_staleness, summary=f"ablation: {name}")


ABLATION = tuple(
    _policy(cost, by_size, by_staleness)
    for cost in FIGURES.values()
    for by_size in (True, False)
    for by_staleness in (True, False)
)
