"""Graphs run by plans; those that cannot be planned run as they are, and are not tried again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from support.handed import handed, linear
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import HandedGraph
from tightfit.errors import CaptureError, NothingToTrain
from tightfit.session.callee import Callee
from tightfit.session.handed_calls import HandedCalls


class Plans:
    """Notes the graphs that it is to run."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[HandedGraph] = []
        self._error = error

    def run_graph(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        self.asked.append(graph)
        if self._error is not None:
            raise self._error
        return ["planned"] * len(graph.module(*inputs))

    def unmeasured(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 2)


@pytest.fixture
def calls(layer: nn.Linear) -> HandedCalls:
    return HandedCalls(Callee(HandedGraph.run_as_it_is, {"": layer}, "layer"))


def given(graph: HandedGraph, layer: nn.Linear) -> Arguments:
    return Arguments.of((graph, torch.ones(4, 3), layer.weight, layer.bias), {})


def is_plain(output: Any, layer: nn.Linear) -> bool:
    return torch.equal(output[0], layer(torch.ones(4, 3)).tanh())


def test_a_graph_that_is_made_again_is_run_as_the_first(
    calls: HandedCalls, layer: nn.Linear
) -> None:
    plans, first, again = Plans(), handed(linear), handed(linear)
    for graph in (first, again, again):
        assert calls.call(given(graph, layer), weakref.ref(plans)) == ["planned"] * 2
    assert plans.asked == [first] * 3


def test_a_graph_that_cannot_be_captured_is_left_out_and_named(
    calls: HandedCalls, layer: nn.Linear
) -> None:
    plans, graph = Plans(CaptureError("data decide")), handed(linear)
    for _ in range(2):
        assert is_plain(calls.call(given(graph, layer), weakref.ref(plans)), layer)
    assert plans.asked == [graph]
    assert any("data decide" in reason for reason in calls.outside.reasons().values())


def test_nothing_to_train_is_the_users_error_and_leaves_nothing_out(
    calls: HandedCalls, layer: nn.Linear
) -> None:
    plans, graph = Plans(NothingToTrain("no gradient")), handed(linear)
    for _ in range(2):
        with pytest.raises(NothingToTrain):
            calls.call(given(graph, layer), weakref.ref(plans))
    assert plans.asked == [graph] * 2


def test_without_plans_a_graph_runs_as_it_is(calls: HandedCalls, layer: nn.Linear) -> None:
    plans = Plans()
    gone = weakref.ref(plans)
    del plans
    assert is_plain(calls.call(given(handed(linear), layer), gone), layer)
    assert calls.inspect(given(handed(linear), layer), lambda graph: len(graph.inputs)) == 4
