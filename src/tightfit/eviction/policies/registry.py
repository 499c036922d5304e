"""Every policy by name."""

from __future__ import annotations

from tightfit.errors import BadInput
from tightfit.eviction.policies.ablation import ABLATION
from tightfit.eviction.policies.dtr import BASELINES, DTR, PROOF
from tightfit.eviction.policies.improved import IMPROVED
from tightfit.eviction.policies.policy import Policy

POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (*IMPROVED, *DTR, *BASELINES, *PROOF, *ABLATION)
}
"""Policies by name."""

DEFAULT = IMPROVED[0].name


def policy_named(name: str) -> Policy:
    """Return a policy.

    Raises `BadInput` for an unknown name; lists the known names.
    """
    if name not in POLICIES:
        raise BadInput(f"there is no eviction policy {name!r}; choose among {', '.join(POLICIES)}")
    return POLICIES[name]
