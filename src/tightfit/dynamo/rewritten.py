"""Graphs of Dynamo's, rewritten where AOTAutograd would refuse them or return other tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from tightfit.torch_private import dynamo as private
from tightfit.torch_private import traces
from tightfit.torch_private.frames.examples import example_of


def rewritten(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph in which an assignment to ``.data`` writes into the tensor.

    Dynamo makes ``set_`` of such an assignment, and undoes the change that this counts as. Values
    of another shape or type cannot be written: there ``set_`` stays, and is refused. Dropout that
    drops nothing is left out: it returns its input, where AOTAutograd makes a copy.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node in list(graph.nodes):
        counted = private.undone_assignment(node)
        if counted is not None and _may_be_written(*node.all_input_nodes):
            for each in counted:
                graph.erase_node(each)
            _write(graph, node)
        elif node.target in _DROPOUTS and _drops_nothing(*node.args, **node.kwargs):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    return traces.lazy_module(module, graph)


_DROPOUTS = (F.dropout, torch.dropout)


def _drops_nothing(
    _: Any = None, p: Any = 0.5, training: Any = True, *rest: Any, **named: Any
) -> bool:
    """Whether dropout with such arguments returns its input; `torch.dropout` says `train`."""
    is_off = training is False or named.get("train", True) is False
    return is_off or (isinstance(p, float) and p == 0.0)


def _may_be_written(target: fx.Node, value: fx.Node) -> bool:
    """Whether one tensor's values may be written into the other, and are used nowhere else."""
    old, new = example_of(target), example_of(value)
    is_alike = (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype)
    is_shared = value.op == "placeholder" or any(user.op == "output" for user in value.users)
    return is_alike and old.device == new.device and not is_shared


def _write(graph: fx.Graph, node: fx.Node) -> None:
    """Have a node write the new values in place of the old ones, unseen by autograd."""
    target, value = node.all_input_nodes
    with graph.inserting_before(node):
        data = graph.call_function(private.data_of, (target,))
        graph.call_method("copy_", (data, value))
    node.replace_all_uses_with(target)
    graph.erase_node(node)
