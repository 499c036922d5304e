"""The policies of the paper: h_DTR with its approximations, the baselines, the reduced score."""

from __future__ import annotations

from tightfit.eviction.policies.policy import Cost, Policy

DTR = (
    Policy("h_dtr", Cost.AROUND),
    Policy("h_dtr_eq", Cost.CLASSES),
    Policy("h_dtr_local", Cost.LOCAL),
)
"""Section 4.1, appendix C.3: cost / (bytes * staleness)."""

BASELINES = (
    Policy("lru", Cost.NONE, by_size=False),  # the least recently used
    Policy("size", Cost.NONE, by_staleness=False),  # the largest (Kumar et al.)
    # cost of inputs it needs first, by bytes (Peng et al., Capuchin)
    Policy("msps", Cost.BEFORE, by_staleness=False),
    Policy("random", Cost.RANDOM, by_size=False, by_staleness=False),
)
"""Section 4.1: classic caching policies, GreedyRemat and MSPS."""

PROOF = (Policy("h_e_star", Cost.COUNT, by_staleness=False),)
"""Theorem 3.1 (appendix A.3): how many storages an eviction would join, by bytes."""
