"""Private names of PyTorch by which a joint graph is split into a forward and a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    reordering_to_mimic_autograd_engine,
)
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn


def is_tangent(node: fx.Node) -> bool:
    """Whether an input of a joint graph is the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def backward_nodes(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the operators of a joint graph that can run only in its backward."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        after = any(n in found or is_tangent(n) for n in node.all_input_nodes)
        placed = node.meta.get("partitioner_tag") == "must_be_in_backward"
        if node.op == "call_function" and (after or placed):
            found.add(node)
    return frozenset(found)


def device_of(module: fx.GraphModule) -> str:
    """Return the kind of device that a joint graph computes on."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    kinds = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return "cuda" if "cuda" in kinds else "cpu"


def split(
    module: fx.GraphModule, saved: Sequence[fx.Node], forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return a forward that hands over saved values, and a backward that makes the rest again.

    Values are made again just before they are read, as PyTorch's own partitioner has it.
    """
    forward, backward = _extract_fwd_bwd_modules(
        module, list(saved), [], num_fwd_outputs=forward_outputs
    )
    return forward, reordering_to_mimic_autograd_engine(backward)


def partitioned_by(partitioner: CustomPartitionerFn) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Inductor splits joint graphs by a function."""
    stack = contextlib.ExitStack()
    stack.enter_context(inductor_config.patch(custom_partitioner_fn=partitioner))
    stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
    return stack
