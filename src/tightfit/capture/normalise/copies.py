"""Copies that are not needed, and arguments that are not read."""

from __future__ import annotations

import torch
from torch import fx

from tightfit.capture.nodes import base_of
from tightfit.capture.normalise.rewriting import Rewriting
from tightfit.torch_private import core as private

aten = torch.ops.aten


_SHAPE_ONLY: dict[object, tuple[int, ...]] = {
    aten.nll_loss_backward.default: (1,),
    aten.nll_loss2d_backward.default: (1,),
    aten.avg_pool2d_backward.default: (1,),
    aten.avg_pool3d_backward.default: (1,),
    aten._adaptive_avg_pool2d_backward.default: (1,),
    aten._adaptive_avg_pool3d_backward.default: (1,),
    aten.max_pool2d_with_indices_backward.default: (1,),
    aten.max_pool3d_with_indices_backward.default: (1,),
    aten.adaptive_max_pool2d_backward.default: (1,),
    aten.reflection_pad2d_backward.default: (1,),
    aten.replication_pad2d_backward.default: (1,),
}
"""Arguments of backward operators of which their kernels read nothing but the shape."""


def drop_detaches(work: Rewriting) -> None:
    """Drop operators that give their argument itself."""
    for node in list(work.graph.nodes):
        if node.op == "call_function" and node.target in (
            aten.detach.default,
            aten.alias.default,
            aten.lift_fresh.default,
        ):
            work.replace(node, node.args[0])


def drop_clones(work: Rewriting) -> None:
    """Drop copies with unchanged strides: in a functional graph they are the identity.

    Unless code outside could see it: a copy that is returned, or of a tensor that the step mutates.
    And unless it carries out an operation put off by views: conjugation, negation.
    """
    outputs = {base_of(n) for n in work.outputs}
    mutated = {work.placeholders[i] for _, i in work.write_backs}
    mutated |= {base_of(n) for n, _ in work.write_backs}
    mutated -= _copied_for_new_content(work)
    for node in list(work.graph.nodes):
        if node.op != "call_function" or node.target is not aten.clone.default:
            continue
        source = node.args[0]
        value = source.meta["val"]
        same = node.meta["val"].stride() == value.stride()
        if value.is_conj() or value.is_neg():
            continue
        if same and base_of(source) not in mutated and base_of(node) not in outputs:
            work.replace(node, source)


def _copied_for_new_content(work: Rewriting) -> set[fx.Node]:
    """Return the mutated tensors of which only a copy is read, once: by what makes the new content.

    The tracer makes such copies, so that its operators in place spare the tensor itself.
    """
    found: set[fx.Node] = set()
    for written, position in work.write_backs:
        primal = work.placeholders[position]
        readers = list(primal.users)
        copied = len(readers) == 1 and readers[0].target is aten.clone.default
        if copied and list(readers[0].users) == [base_of(written)]:
            found.add(primal)
    return found


def drop_unread_arguments(work: Rewriting) -> None:
    """Drop arguments that a kernel does not read, or whose shape alone it reads."""
    for node in list(work.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.native_batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
        if node.target is aten.batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
        for index in _SHAPE_ONLY.get(node.target, ()):
            _read_shape_only(work, node, index)


def _read_shape_only(work: Rewriting, node: fx.Node, index: int) -> None:
    """Replace an argument whose values are not read by one element expanded to its shape.

    Only for dense tensors in standard order: with channels_last the memory format of the argument
    decides the format of the result.
    """
    source = node.args[index]
    if not isinstance(source, fx.Node) or base_of(source).op == "placeholder":
        return
    value = source.meta["val"]
    if not value.is_contiguous() or value.numel() == 0:
        return
    shell = torch.empty(1, dtype=value.dtype, device=value.device).expand(value.shape)
    with private.fake_mode_of(value):
        fake = torch.empty(1, dtype=value.dtype, device=value.device).expand(value.shape)
    with work.graph.inserting_before(node):
        constant = work.constant(f"_shape_only_{node.name}", shell, fake)
    node.update_arg(index, constant)
