"""h_DTR and its two approximations (section 4.1, appendix C.3): cost / (bytes * staleness)."""

from __future__ import annotations

from tightfit.eviction.policies.policy import Cost, Policy

DTR = (
    Policy("h_dtr", Cost.AROUND, summary="h_DTR: cost of the exact evicted neighbourhood"),
    Policy("h_dtr_eq", Cost.CLASSES, summary="h_DTR_eq: the neighbourhood by union-find"),
    Policy("h_dtr_local", Cost.LOCAL, summary="h_DTR_local: its own cost only"),
)
