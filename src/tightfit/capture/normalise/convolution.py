"""The backward of a convolution in two ops: the gradient of the weight, then that of the input.

MONeT (section 5.2) splits it for the same reason: the gradient of the input does not read the
input, which can be freed before that gradient is made. The kernels are those that the one
operator runs one after the other, so every bit stays as it is.
"""

from __future__ import annotations

import torch
from torch import fx

from tightfit.capture.nodes import base_of, is_getitem, is_op, note_view, storage_bytes
from tightfit.capture.normalise.rewriting import Rewriting

__all__ = ["split_convolution_backward"]

aten = torch.ops.aten

_INPUT, _WEIGHT, _MASK = 1, 2, 10  # positions among the arguments
_WEIGHT_AND_BIAS = (1, 2)  # outputs of the first half
_LARGE_SHARE = 0.5  # of the largest input of a convolution: what counts as large


def split_convolution_backward(work: Rewriting) -> None:
    """Split the backward of each convolution that is the last to read a value, or is a large one.

    Where somebody else reads the value later (the backward of the ReLU that made it), only the
    workspace shrinks: that matters for the largest, elsewhere it would only be one more op. The
    operator wants some tensor of the input's shape even where it does not look at it; the incoming
    gradient is given another shape for that, so it must be at least as large.
    """
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in work.graph.nodes:
        if is_op(node) or node.op == "output":
            last_reader.update(dict.fromkeys(map(base_of, node.all_input_nodes), node))
    splittable = [
        node
        for node in work.graph.nodes
        if node.target is aten.convolution_backward.default and _is_splittable(node)
    ]
    largest = max((_read_bytes(node) for node in splittable), default=0)
    for node in splittable:
        is_large = _read_bytes(node) >= _LARGE_SHARE * largest
        if is_large or last_reader[base_of(node.args[_INPUT])] is node:
            _split(work.graph, node)


def _read_bytes(node: fx.Node) -> int:
    return storage_bytes(node.args[_INPUT].meta["val"])


def _is_splittable(node: fx.Node) -> bool:
    gradient, source = node.args[0], node.args[_INPUT]
    if not isinstance(gradient, fx.Node) or not isinstance(source, fx.Node):
        return False
    if "placeholder" in (base_of(gradient).op, base_of(source).op):
        return False
    mask = node.args[_MASK]
    if not (mask[0] and mask[1]):
        return False
    given, wanted = gradient.meta["val"], source.meta["val"]
    dense = given.is_contiguous() or given.is_contiguous(memory_format=torch.channels_last)
    plain = wanted.is_contiguous() or wanted.is_contiguous(memory_format=torch.channels_last)
    return dense and plain and given.dtype == wanted.dtype and given.numel() >= wanted.numel() > 0


def _split(graph: fx.Graph, node: fx.Node) -> None:
    gradient, source, mask = node.args[0], node.args[_INPUT], node.args[_MASK]
    outputs = node.meta["val"]
    wanted = source.meta["val"]
    with graph.inserting_before(node):
        weight = _half(graph, node, source, [False, *mask[1:]])
        weight.meta["val"] = (None, *outputs[1:])
        shape = (gradient, list(wanted.shape), list(wanted.stride()))
        shell = graph.call_function(aten.as_strided.default, shape)
        shell.meta = {**_origin(node), "val": wanted}
        note_view(shell)
        inner = _half(graph, node, shell, [True, False, False])
        inner.meta["val"] = (outputs[0], None, None)
    for user in list(node.users):
        if is_getitem(user):
            user.args = (weight if user.args[1] in _WEIGHT_AND_BIAS else inner, user.args[1])
    graph.erase_node(node)


def _half(graph: fx.Graph, node: fx.Node, source: fx.Node, mask: list[bool]) -> fx.Node:
    args = list(node.args)
    args[_INPUT], args[_MASK] = source, mask
    half = graph.call_function(node.target, tuple(args), node.kwargs)
    half.meta = _origin(node)
    return half


def _origin(node: fx.Node) -> dict[str, object]:
    """What the trace knows of a node, but for its result."""
    return {key: value for key, value in node.meta.items() if key != "val"}
