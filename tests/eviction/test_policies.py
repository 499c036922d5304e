"""Scores by hand, on five operators: which storage each policy gives up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from support.logs import call
from support.reference.replay import simulate_in_python
from tightfit.errors import BadInput
from tightfit.eviction.log.instructions import Constant, Instruction, Release
from tightfit.eviction.log.resolve import resolve
from tightfit.eviction.policies.ablation import ABLATION, FIGURES
from tightfit.eviction.policies.policy import Cost
from tightfit.eviction.policies.registry import POLICIES, policy_named
from tightfit.eviction.replayed import Rules
from tightfit.eviction.simulator import Simulator

# a and b stand on an evicted m; a is old, small and cheap, b new, large and dear.
PROGRAM: list[Instruction] = [
    Constant("x", 1),
    call("m", "x", size=2, time=50),
    call("a", "m", size=2, time=3),
    call("b", "m", size=8, time=20),
    Release("m"),
    call("c", "x", size=4, time=1),
    call("d", "x", size=1, time=7),
    call("e", "x", size=8, time=7),
]


@pytest.mark.parametrize(
    ("policy", "evicted"),
    [
        ("lru", "a"),
        ("size", "b"),
        ("h_dtr_local", "c"),  # 1 / (4 * 7) against 3 / (2 * 28) and 20 / (8 * 8)
        ("h_dtr", "c"),
        ("msps", "c"),  # 1 / 4 against 53 / 2 and 70 / 8
        ("h_e_star", "c"),  # 2 / 8 of b and 1 / 4: of several the last
        ("improved", "c"),
    ],
)
@pytest.mark.parametrize("in_python", [True, False])
def test_each_policy_evicts_the_lowest_score(policy: str, evicted: str, in_python: bool) -> None:
    log = resolve(PROGRAM)
    simulator = Simulator(log)
    asked = POLICIES[policy], 23, Rules(thrash=99)
    found = (
        simulate_in_python(simulator, *asked)
        if in_python
        else simulator.simulate(*asked, with_moments=True)
    )
    pressure = [m for m in found.moments if m.kind == "evict"]
    assert log.tensors[pressure[0].tensor].name == evicted


@dataclass(frozen=True)
class Known:
    """A candidate of which everything is given."""

    size_bytes: int = 4
    staleness: float = 2.0

    def cost(self, kind: Cost) -> float:
        return {Cost.NONE: 1.0, Cost.LOCAL: 3.0, Cost.BEFORE: 4.0}.get(kind, 8.0)


def test_scores_are_the_formulas_of_the_paper() -> None:
    known = Known()
    assert POLICIES["h_dtr"].score(known) == POLICIES["h_dtr_eq"].score(known) == 8 / (4 * 2)
    assert POLICIES["h_dtr_local"].score(known) == 3 / (4 * 2)
    assert POLICIES["msps"].score(known) == 4 / 4
    assert POLICIES["size"].score(known) == 1 / 4
    assert POLICIES["lru"].score(known) == 1 / 2
    assert POLICIES["size"].score(Known(size_bytes=0)) == float("inf")
    assert POLICIES["cost=none"].score(known) == 1


def test_the_ablation_holds_the_papers_policies() -> None:
    assert len({policy.name for policy in ABLATION}) == 4 * len(FIGURES)
    alike = {
        "cost=around,size,staleness": "h_dtr",
        "cost=classes,size,staleness": "h_dtr_eq",
        "cost=local,size,staleness": "h_dtr_local",
        "cost=none,staleness": "lru",
        "cost=none,size": "size",
    }
    known = Known(7, 3.0)
    for ablated, named in alike.items():
        assert POLICIES[ablated].score(known) == POLICIES[named].score(known)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"no eviction policy 'dtr'.*h_dtr_eq"):
        policy_named("dtr")
