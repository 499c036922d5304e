"""A graph as Dynamo hands it over, calls of it, and steps captured of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tightfit.capture.handed import GraphArguments, HandedGraph, HandedGraphs
from tightfit.session.callee import Callee
from tightfit.session.options import Options
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.specialisation import Specialisation


def handed(function: Callable[..., tuple[Any, ...]], **more: Any) -> HandedGraph:
    """Return the graph of a function, whose parameters are its inputs."""
    return HandedGraph(fx.symbolic_trace(function), **more)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return two outputs of a linear layer."""
    made = F.linear(x, weight, bias)
    return made.tanh(), made.exp()


def chain(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """Return the end of a chain, of which a backward reads all four values before."""
    made = F.linear(x, weight, bias)
    for _ in range(4):
        made = made.sin().exp()
    return (made,)


def call_of(
    graphs: HandedGraphs, graph: HandedGraph, layer: nn.Linear, rows: int = 4
) -> GraphArguments:
    """Return the arguments of a call of a graph with a layer."""
    return graphs.arguments(graph, [torch.ones(rows, layer.in_features), layer.weight, layer.bias])


class LayerCalls:
    """Calls of a graph of one layer, and the steps captured of them."""

    def __init__(
        self,
        layer: nn.Linear,
        options: Options,
        function: Callable[..., tuple[Any, ...]] = linear,
    ) -> None:
        self.layer, self.options, self.now = layer, options, 0
        self._graphs, self._graph = HandedGraphs({"model": layer}), handed(function)
        self.callee = Callee(self._graphs, {"model": layer}, "layer")
        self.captures = Captures(self.callee)

    def given(self, rows: int) -> GraphArguments:
        return call_of(self._graphs, self._graph, self.layer, rows)

    def found(self, rows: int) -> Specialisation | None:
        given = self.given(rows)
        return self.captures.find(self.captures.signature(given), given)

    def capture(self, rows: int) -> Specialisation:
        given = self.given(rows)
        key = self.captures.signature(given)
        self.now += 1
        call = self.captures.traced_call(key, given)
        return self.captures.capture(key, call, self.options, self.now)
