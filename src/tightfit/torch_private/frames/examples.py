"""Example values of the nodes of Dynamo's graphs, and what they hold in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only


def example_of(node: fx.Node) -> Any:
    """Return the example value of a node when Dynamo made it: fake tensors, symbols."""
    return node.meta.get("example_value")


def free_histories(module: fx.GraphModule) -> None:
    """Forget example values that have a history: it holds numbers in memory.

    `module`: the graph, with those inside it.
    """
    for node in _nodes_of(module):
        example = example_of(node)
        with_history = [x for x in tree_leaves(example) if _has_history(x)]
        if not with_history:
            continue
        # a value inside `torch.func.vmap` or `grad` cannot be detached outside of it
        if isinstance(example, torch.Tensor) or any(map(is_functorch_wrapped_tensor, with_history)):
            del node.meta["example_value"]
        else:
            kept = tree_map_only(
                torch.Tensor, lambda x: x.detach() if _has_history(x) else x, example
            )
            node.meta["example_value"] = kept


def _has_history(example: Any) -> bool:
    return isinstance(example, torch.Tensor) and example.grad_fn is not None


def free_numbers(module: fx.GraphModule) -> None:
    """Forget the numbers, in memory, that example values of finished graphs stand for.

    `module`: the graph, with those inside it.
    """
    for node in _nodes_of(module):
        for example in tree_leaves(example_of(node)):
            if isinstance(example, FakeTensor):
                example.constant = None


def _nodes_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    for each in module.modules():
        if isinstance(each, fx.GraphModule):
            yield from each.graph.nodes
