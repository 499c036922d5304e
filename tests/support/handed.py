"""A graph as Dynamo hands it over, and calls of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tightfit.capture.handed import GraphArguments, HandedGraph, HandedGraphs


def handed(function: Callable[..., tuple[Any, ...]], **more: Any) -> HandedGraph:
    """Return the graph of a function, whose parameters are its inputs."""
    return HandedGraph(fx.symbolic_trace(function), **more)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return two outputs of a linear layer."""
    made = F.linear(x, weight, bias)
    return made.tanh(), made.exp()


def call_of(
    graphs: HandedGraphs, graph: HandedGraph, layer: nn.Linear, rows: int = 4
) -> GraphArguments:
    """Return the arguments of a call of the graph of `linear` with a layer."""
    return graphs.arguments(graph, [torch.ones(rows, layer.in_features), layer.weight, layer.bias])
