"""The paper's baselines (section 4.1): classic caching policies, GreedyRemat and MSPS."""

from __future__ import annotations

from tightfit.eviction.policies.policy import Cost, Policy

BASELINES = (
    Policy("lru", Cost.NONE, by_size=False, summary="h_LRU: the least recently used"),
    Policy("size", Cost.NONE, by_staleness=False, summary="h_size: the largest (Kumar et al.)"),
    Policy(
        "msps",
        Cost.BEFORE,
        by_staleness=False,
        summary="h_MSPS: cost of inputs it needs first, by bytes (Peng et al., Capuchin)",
    ),
    Policy("random", Cost.RANDOM, by_size=False, by_staleness=False, summary="h_rand: any"),
)
