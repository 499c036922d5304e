"""The comparisons of the paper's figures: which policies, under which deallocation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tightfit.eviction.policies.ablation import ABLATION, FIGURES
from tightfit.eviction.policies.dtr import BASELINES, DTR
from tightfit.eviction.policies.improved import IMPROVED
from tightfit.eviction.policies.policy import Policy
from tightfit.eviction.replayed import Deallocation, Replayed, Rules
from tightfit.eviction.simulator import Simulator


@dataclass(frozen=True)
class Comparison:
    """One figure."""

    figure: int  # its number in the paper
    title: str  # names the comparison
    policies: tuple[Policy, ...]  # its lines, or one policy if they are ways of deallocation
    deallocations: tuple[Deallocation, ...] = ("eager",)  # one, or as many as lines
    measure: Literal["slowdown", "accesses"] = "slowdown"  # the quantity drawn


COMPARISONS = (
    Comparison(2, "Policies", (*IMPROVED, *DTR, *BASELINES)),
    *(
        Comparison(
            figure,
            f"Ablation, cost = {cost.name.lower()}",
            tuple(p for p in ABLATION if p.cost is cost),
        )
        for figure, cost in FIGURES.items()
    ),
    Comparison(11, "Deallocation, h_DTR", DTR[:1], ("eager", "banish", "ignore")),
    Comparison(12, "Accesses of storages and classes", DTR, measure="accesses"),
)
"""Figures 2 and 7 to 12; ours are shown with the paper's policies."""


class ComparisonPoint(NamedTuple):
    """One point of one line; its name is the policy's or the deallocation's."""

    comparison: Comparison
    line: str
    ratio: float
    found: Replayed


def sweep(
    simulator: Simulator, ratios: Sequence[float], *, seed: int = 0
) -> Iterator[ComparisonPoint]:
    """Yield every point of every figure, as found."""
    for comparison in COMPARISONS:
        for policy in comparison.policies:
            for deallocation in comparison.deallocations:
                line = policy.name if len(comparison.deallocations) == 1 else deallocation
                rules = Rules(deallocation)
                for ratio in ratios:
                    budget_bytes = simulator.budget_at(ratio)
                    found = simulator.simulate(policy, budget_bytes, rules, seed=seed)
                    yield ComparisonPoint(comparison, line, ratio, found)
