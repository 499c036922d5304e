"""Calls of handed graphs: members of modules are no arguments, and guards are looked at."""

from __future__ import annotations

import torch
from torch import nn

from support.handed import call_of, handed, linear
from tightfit.capture.graph_calls import GraphCalls
from tightfit.capture.handed import HandedGraphs


def test_members_are_no_arguments_and_are_fetched_by_name_when_it_runs() -> None:
    layer, graph = nn.Linear(3, 2), handed(linear)
    graphs = HandedGraphs({"": layer})
    given = call_of(graphs, graph, layer)
    x, number = given.args
    assert x is given.inputs[0] and graphs.graph(number) is graph
    assert graphs.takes(layer.bias) and not graphs.takes(x)
    layer.weight = nn.Parameter(torch.zeros(2, 3))
    layer.bias = nn.Parameter(torch.zeros(2))
    assert not graphs.is_as_it_was(given)
    assert torch.equal(graphs(*given.args)[1], torch.ones(4, 2))


def test_a_graph_of_two_modules_has_a_number_for_each() -> None:
    layers, graph = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), handed(linear)
    graphs = HandedGraphs({"": layers})
    first, second = (call_of(graphs, graph, layer).args[-1] for layer in layers)
    assert first != second
    assert call_of(graphs, graph, layers[0], rows=8).args[-1] == first
    assert graphs.modules_of(second) == {layers[1]}


def test_numbers_that_may_change_become_tensors_and_numbers_again() -> None:
    graph = handed(lambda x, times: (x * times,), numbers=(1,))
    graphs = HandedGraphs({})
    given = graphs.arguments(graph, [torch.ones(2), 3])
    assert isinstance(given.args[1], torch.Tensor) and graphs.has_numbers(given.args[-1])
    assert graphs(*given.args)[0].tolist() == [3.0, 3.0]


def test_a_signature_tells_which_input_shares_memory_with_a_member() -> None:
    layer, graph = nn.Linear(4, 4), handed(linear)
    graphs = HandedGraphs({"": layer})
    calls = GraphCalls(graphs)
    apart = call_of(graphs, graph, layer)
    weights = layer.weight.detach()  # of the shape of the other input
    shared = graphs.arguments(graph, [weights, layer.weight, layer.bias])
    signature = calls.signature(apart)
    assert signature == calls.signature(call_of(graphs, graph, layer))
    assert signature != calls.signature(shared)
    assert calls.is_as_it_was(apart, signature)
    with torch.autocast("cpu", torch.bfloat16):
        assert not calls.is_as_it_was(apart, signature)
