"""The ablation of appendix D.1: every measure of cost, with and without bytes and staleness.

Names list the terms that are kept: ``cost=around,size,staleness`` is h_DTR, ``cost=none,staleness``
h_LRU.
"""

from __future__ import annotations

from tightfit.eviction.policies.policy import Cost, Policy

FIGURES = {7: Cost.AROUND, 8: Cost.CLASSES, 9: Cost.LOCAL, 10: Cost.NONE}
"""The measure of cost that each figure of the paper holds fixed."""


def _policy(cost: Cost, divisors: tuple[str, ...]) -> Policy:
    name = ",".join([f"cost={cost.name.lower()}", *divisors])
    return Policy(name, cost, "size" in divisors, "staleness" in divisors)


ABLATION = tuple(
    _policy(cost, divisors)
    for cost in FIGURES.values()
    for divisors in (("size", "staleness"), ("size",), ("staleness",), ())
)
