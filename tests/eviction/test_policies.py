"""Scores by hand: which of two candidates each policy evicts."""

from __future__ import annotations

import pytest

from tightfit.eviction.policies import POLICIES, Candidate


def candidate(
    size: int, staleness: float, cost: float, before: float = 0.0, around: float = 0.0
) -> Candidate:
    return Candidate(size, staleness, cost, lambda: before, lambda: around)


@pytest.mark.parametrize(
    ("policy", "evicted", "kept"),
    [
        ("lru", candidate(1, 9.0, 9.0), candidate(9, 1.0, 1.0)),
        ("size", candidate(9, 1.0, 9.0), candidate(1, 9.0, 1.0)),
        ("dtr_local", candidate(2, 4.0, 8.0, around=100.0), candidate(2, 4.0, 9.0)),
        ("dtr", candidate(2, 4.0, 9.0), candidate(2, 4.0, 8.0, around=100.0)),
        ("msps", candidate(2, 1.0, 9.0), candidate(2, 9.0, 8.0, before=100.0)),
    ],
)
def test_each_policy_evicts_the_lower_score(
    policy: str, evicted: Candidate, kept: Candidate
) -> None:
    assert POLICIES[policy](evicted) < POLICIES[policy](kept)


def test_scores_are_the_formulas_of_the_paper() -> None:
    one = candidate(4, 2.0, 3.0, before=1.0, around=5.0)
    assert POLICIES["dtr"](one) == pytest.approx((3 + 5) / (4 * 2), rel=1e-6)
    assert POLICIES["dtr_local"](one) == pytest.approx(3 / (4 * 2), rel=1e-6)
    assert POLICIES["msps"](one) == pytest.approx((3 + 1) / 4)
