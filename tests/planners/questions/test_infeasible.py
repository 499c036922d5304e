"""The message for a budget that cannot hold: asked, least, where, and ways out."""

from __future__ import annotations

import msgspec
import pytest

from support.graphs import two_layers
from tightfit.planners.base import Task
from tightfit.planners.questions.infeasible import infeasible_message
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.planners.registry import plan_with

GRAPH = two_layers()


def message_for(budget_bytes: int) -> str:
    task = Task(graph=GRAPH, budget_bytes=budget_bytes)
    outcome = plan_with("greedy", task)
    assert outcome.plan is None
    return infeasible_message(task, outcome, minimum_budget(GRAPH))


def test_it_says_what_was_asked_the_least_where_and_what_to_try() -> None:
    message = message_for(4400)
    assert "no plan of two layers fits the budget of 4.30 KiB (proven: there is none" in message
    assert "a plan fits 4600 bytes" in message
    held = "gradients of parameters 1.95 KiB, act 400 B, second 100 B"
    assert f"op 6 aten.mm in first, which needs at once: {held}" in message
    assert "a budget of 4600B" in message
    assert "a batch 60 % as large" in message  # 300 of 500 bytes scale with it
    assert "fewer features or a smaller input in act" in message


@pytest.mark.parametrize("budget_bytes", [4100, 100])
def test_no_batch_is_promised_where_constants_and_gradients_are_too_large(
    budget_bytes: int,
) -> None:
    assert "no batch fits" in message_for(budget_bytes)


def test_nearly_this_batch_is_no_advice() -> None:
    assert "% as large" not in message_for(4590)


def test_a_large_minimum_is_rounded_up_to_a_size_that_can_be_typed() -> None:
    values = tuple(
        msgspec.structs.replace(value, size_bytes=value.size_bytes * 1000003)
        for value in GRAPH.values
    )
    constants = {kind: size * 1000003 for kind, size in GRAPH.constants_bytes.items()}
    graph = msgspec.structs.replace(GRAPH, values=values, constants_bytes=constants)
    task = Task(graph=graph, budget_bytes=1)
    least = minimum_budget(graph)
    message = infeasible_message(task, plan_with("greedy", task), least)
    assert f"a budget of {-(-least.found_bytes // (1 << 20))}MiB" in message
