"""Ours: the paper's score without three wastes of its handling, and with the cost of ancestors.

Views are no operators. Tensors that were brought back and are not held are evicted at once (OneFlow
does the same). Gradients in flight go last, since their inputs are mostly gone.
"""

from __future__ import annotations

from dataclasses import replace

from tightfit.eviction.policies.dtr import DTR
from tightfit.eviction.policies.policy import Cost, Policy


def _improved(policy: Policy, name: str) -> Policy:
    return replace(policy, name=name, views_run_again=False, keeps_dead=False, backward_last=True)


IMPROVED = (
    _improved(DTR[1], "improved"),
    # with the cost of all operators it would need first
    _improved(Policy("", Cost.OPERATORS), "improved_ancestors"),
    _improved(DTR[0], "improved_exact"),  # with the exact evicted neighbourhood of h_DTR
)
