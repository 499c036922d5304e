"""The reduced score of Theorem 3.1 (appendix A.3): how many storages an eviction would join."""

from __future__ import annotations

from tightfit.eviction.policies.policy import Cost, Policy

PROOF = (
    Policy(
        "h_e_star",
        Cost.COUNT,
        by_staleness=False,
        summary="h_e*: storages of the evicted neighbourhood, by bytes",
    ),
)
