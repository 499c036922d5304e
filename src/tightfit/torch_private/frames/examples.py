"""Example values of the nodes of Dynamo's graphs, and what they hold in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


def example_of(node: fx.Node) -> Any:
    """Return the example value of a node when Dynamo made it: fake tensors, symbols."""
    return node.meta.get("example_value")


def free_histories(graph: fx.Graph) -> None:
    """Forget example values of nodes that have a history: it holds numbers in memory."""
    for node in graph.nodes:
        example = example_of(node)
        if isinstance(example, torch.Tensor) and example.grad_fn is not None:
            del node.meta["example_value"]


def free_numbers(graph: fx.Graph) -> None:
    """Forget the numbers, in memory, that example values of a finished graph stand for."""
    for node in graph.nodes:
        for example in tree_leaves(example_of(node)):
            if isinstance(example, FakeTensor):
                example.constant = None
