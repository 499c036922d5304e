"""The policies of the paper: h_DTR with its approximations, the baselines, the reduced score."""

from __future__ import annotations

from tightfit.eviction.policies.policy import Cost, Policy

DTR = (
    Policy("h_dtr", Cost.AROUND, summary="h_DTR: cost of the exact evicted neighbourhood"),
    Policy("h_dtr_eq", Cost.CLASSES, summary="h_DTR_eq: the neighbourhood by union-find"),
    Policy("h_dtr_local", Cost.LOCAL, summary="h_DTR_local: its own cost only"),
)
"""Section 4.1, appendix C.3: cost / (bytes * staleness)."""

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
"""Section 4.1: classic caching policies, GreedyRemat and MSPS."""

PROOF = (
    Policy(
        "h_e_star",
        Cost.COUNT,
        by_staleness=False,
        summary="h_e*: storages of the evicted neighbourhood, by bytes",
    ),
)
"""Theorem 3.1 (appendix A.3): how many storages an eviction would join."""
