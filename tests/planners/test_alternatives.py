"""What plans gain from alternatives: never worse than without, and less memory at no cost."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit.graph.ir import Graph
from tightfit.graph.liveness import budget_of_ratio
from tightfit.plan.plan import Compute
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.narrower import choices_in, narrower_problem
from tightfit.planners.registry import plan_with
from tightfit.studies.dry_step import AllowedAlternatives, graph_of
from tightfit.zoo import Example

LIMITS = Limits(seconds=60.0, iterations=40, seed=1)


class Small(nn.Module):
    """Convolutions with activations whose gradient reads their output, masks and a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        h = F.relu6(self.norm(self.first(x)))
        h = F.max_pool2d(F.relu(self.second(h)), 2)
        return F.dropout(F.leaky_relu(self.third(h)), 0.1).mean()


class Words(nn.Module):
    """A loss over a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 16)
        self.head = nn.Linear(16, 2000)

    def forward(self, words):
        return F.cross_entropy(self.head(torch.tanh(self.embedding(words))), words)


def graph(
    group: str, exactness: str = "bitwise", *, words: bool = False, costs: str = "p100"
) -> Graph:
    def example() -> Example:
        if words:
            return Example(Words(), None, (torch.randint(0, 2000, (600,)),), None)
        return Example(Small().train(), None, (torch.randn(8, 3, 32, 32),), None)

    return graph_of(
        example, optimizer="none", costs=costs, alternatives=AllowedAlternatives(exactness, group)
    )


@pytest.mark.parametrize("ratio", [0.5, 0.6, 0.75, 0.9])
def test_a_plan_that_may_use_alternatives_is_never_worse(ratio: float) -> None:
    without = graph("none")
    budget = budget_of_ratio(without, ratio)
    best = plan_with("anytime", Task(graph=without, budget_bytes=budget), LIMITS)
    for group in ("output", "intermediate", "inplace", "all"):
        task = Task(graph=graph(group), budget_bytes=budget)
        found = plan_with("anytime", task, LIMITS)
        assert best.plan is None or found.plan is not None
        assert found.plan is None or found.bound <= found.overhead
        if best.plan is not None and found.plan is not None:
            assert found.overhead <= best.overhead + 1e-9, group


@pytest.mark.parametrize("ratio", [0.4, 0.6])
def test_a_plan_that_may_round_is_never_worse_than_one_that_may_not(ratio: float) -> None:
    exact, rounding = graph("all", words=True), graph("all", "rounding", words=True)
    task = Task(graph=exact, budget_bytes=budget_of_ratio(exact, ratio))
    best = plan_with("anytime", task, LIMITS)
    found = plan_with("anytime", msgspec.structs.replace(task, graph=rounding), LIMITS)
    assert best.plan is None or found.overhead <= best.overhead + 1e-9


def test_a_wider_problem_takes_the_choices_of_a_narrower_one() -> None:
    step = graph("all", "rounding", words=True)
    task = Task(graph=step, budget_bytes=budget_of_ratio(step, 0.6))
    wide = build_problem(task)
    exact = narrower_problem(task, wide)
    assert exact is not None and exact.exactness == "bitwise"
    plain = narrower_problem(task, exact)
    assert plain is not None and plain.exactness is None
    assert narrower_problem(task, plain) is None
    last = [max(k for k, way in enumerate(ways) if way.first) for ways in exact.alternatives]
    taken = choices_in(wide, exact, last)
    assert taken is not None and wide.alternatives != exact.alternatives
    for op, ways in enumerate(exact.alternatives):
        assert set(wide.alternatives[op][taken[op]].reads) == set(ways[last[op]].reads)


def test_activations_of_less_bytes_are_kept_where_everything_would_fit_without() -> None:
    """At 0.7 of the memory nothing is recomputed: outputs, bits and offsets are enough."""
    step = graph("all")
    budget = budget_of_ratio(step, 0.7)
    outcome = plan_with("anytime", Task(graph=step, budget_bytes=budget), LIMITS)
    assert outcome.plan is not None and simulate(step, outcome.plan).peak_bytes <= budget
    computes = [i for i in outcome.plan.instructions if isinstance(i, Compute)]
    used = {step.ops[i.op].alternatives[i.alternative].name for i in computes}
    assert "hardtanh.from_output" in {name.removesuffix(".over_argument_0") for name in used}
    assert len({i.op for i in computes}) == len(computes)


def test_linked_alternatives_are_taken_together_where_logits_do_not_fit() -> None:
    step = graph("all", "rounding", words=True)
    budget = budget_of_ratio(step, 0.25)
    outcome = plan_with("anytime", Task(graph=step, budget_bytes=budget), LIMITS)
    assert outcome.plan is not None
    ways = Counter(
        step.ops[i.op].alternatives[i.alternative].name
        for i in outcome.plan.instructions
        if isinstance(i, Compute)
    )
    assert ways["linear_cross_entropy.by_rows"] == 1 and ways["linear_cross_entropy.scaled"] == 3


def test_checkmate_o_takes_no_way_that_reads_what_its_schedule_does_not_make() -> None:
    """Gradients from masks cost less here, and no schedule of defaults makes a mask."""
    step = graph("all", costs="cpu")
    task = Task(graph=step, budget_bytes=budget_of_ratio(step, 0.9))
    limits = Limits(seconds=20.0)
    before, found = (plan_with(name, task, limits) for name in ("checkmate", "checkmate_o"))
    assert found.plan is not None and found.overhead <= before.overhead
