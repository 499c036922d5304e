"""Exact clean-ups of a traced step, done before anything else looks at it.

Each pass leaves every bit of the results as it is: it removes copies nobody needs and arguments
nobody reads, and makes explicit what autograd or the epilogue would otherwise do outside the
graph (copies of shared gradients, sums of tied gradients, snapshots of mutated buffers), so that
their bytes are planned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from tightfit.capture.decisions.answers import question_of
from tightfit.capture.nodes import base_of, classify, is_getitem, is_random, is_view
from tightfit.capture.normalise.casts import share_casts
from tightfit.capture.normalise.compact import compact_results
from tightfit.capture.normalise.convolution import split_convolution_backward
from tightfit.capture.operators.dropout import correct_dropout
from tightfit.capture.trace.trace import JointGraph
from tightfit.torch_private import core as private

__all__ = ["normalise"]

aten = torch.ops.aten

# Backward operators that only read the shape of these arguments (operators.md section 6).
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
_BATCH_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
)


def normalise(joint: JointGraph, tied: list[list[int]]) -> JointGraph:
    """Apply every exact clean-up to a traced step, in place, and return it.

    Parameters
    ----------
    joint : JointGraph
        The traced step.
    tied : list of list of int
        Placeholder positions that hold the same parameter.
    """
    classify(joint.module.graph)
    share_casts(joint, tied)
    _correct_statistics(joint)
    correct_dropout(joint.module.graph)
    compact_results(joint.module.graph)
    _drop_detaches(joint)
    _drop_clones(joint)
    _drop_unread_arguments(joint)
    split_convolution_backward(joint)
    _sum_tied_gradients(joint, tied)
    _own_gradients(joint)
    _own_write_backs(joint)
    _snapshot_mutated(joint)
    _erase_dead(joint)
    joint.module.recompile()
    return joint


def _outputs(joint: JointGraph) -> set[fx.Node]:
    nodes = [n for n in joint.raw_outputs if isinstance(n, fx.Node)]
    nodes += [n for n, _ in joint.write_backs] + [n for n, _ in joint.gradients]
    return set(nodes)


def _replace(joint: JointGraph, old: fx.Node, new: fx.Node) -> None:
    """Replace a node everywhere, the lists of outputs included."""
    old.replace_all_uses_with(new)
    joint.raw_outputs[:] = [new if n is old else n for n in joint.raw_outputs]
    joint.write_backs[:] = [(new if n is old else n, i) for n, i in joint.write_backs]
    joint.gradients[:] = [(new if n is old else n, i) for n, i in joint.gradients]


def _correct_statistics(joint: JointGraph) -> None:
    """Give the batch statistics of half-precision inputs the precision the kernel gives them.

    In evaluation they are empty, but backward wants their precision. The fake kernel says half
    precision where the CPU kernel returns single precision.
    """
    for node in joint.module.graph.nodes:
        if node.target not in _BATCH_NORMS:
            continue
        x = node.args[0].meta["val"]
        if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
            continue
        tiny = [
            None if a is None else torch.ones(1, dtype=a.meta["val"].dtype) for a in node.args[1:5]
        ]
        sample = torch.ones(2, 1, 1, dtype=x.dtype)
        real = node.target(sample, *tiny, *node.args[5:])
        fixed = [
            fake if fake.dtype == true.dtype else private.like(fake, true.dtype)
            for fake, true in zip(node.meta["val"], real, strict=True)
        ]
        node.meta["val"] = tuple(fixed)
        for user in node.users:
            if is_getitem(user):
                user.meta["val"] = fixed[user.args[1]]


def _drop_detaches(joint: JointGraph) -> None:
    for node in list(joint.module.graph.nodes):
        if node.op == "call_function" and node.target in (
            aten.detach.default,
            aten.alias.default,
            aten.lift_fresh.default,
        ):
            _replace(joint, node, node.args[0])
            joint.module.graph.erase_node(node)


def _drop_clones(joint: JointGraph) -> None:
    """Drop copies with unchanged strides: in a functional graph they are the identity.

    Unless somebody outside could tell: a copy that is returned, or of what the step mutates. And
    unless it carries out what views put off: conjugation, negation.
    """
    outputs = {base_of(n) for n in _outputs(joint)}
    mutated = {joint.placeholders[i] for _, i in joint.write_backs}
    for node in list(joint.module.graph.nodes):
        if node.op != "call_function" or node.target is not aten.clone.default:
            continue
        source = node.args[0]
        value = source.meta["val"]
        same = node.meta["val"].stride() == value.stride()
        if value.is_conj() or value.is_neg():
            continue
        if same and base_of(source) not in mutated and base_of(node) not in outputs:
            _replace(joint, node, source)
            joint.module.graph.erase_node(node)


def _drop_unread_arguments(joint: JointGraph) -> None:
    for node in list(joint.module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.native_batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
        if node.target is aten.batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
        for index in _SHAPE_ONLY.get(node.target, ()):
            _read_shape_only(joint, node, index)


def _read_shape_only(joint: JointGraph, node: fx.Node, index: int) -> None:
    """Replace an argument whose values nobody reads by one element expanded to its shape.

    Only for dense standard layouts: with channels_last the memory format of the argument
    decides the format of the result.
    """
    graph = joint.module.graph
    source = node.args[index]
    if not isinstance(source, fx.Node) or base_of(source).op == "placeholder":
        return
    value = source.meta["val"]
    if not value.is_contiguous() or value.numel() == 0:
        return
    shell = torch.empty(1, dtype=value.dtype, device=value.device).expand(value.shape)
    name = f"_shape_only_{node.name}"
    joint.module.register_buffer(name, shell, persistent=False)
    with graph.inserting_before(node):
        constant = graph.get_attr(name)
    constant.meta = {"val": value}
    node.update_arg(index, constant)


def _sum_tied_gradients(joint: JointGraph, tied: list[list[int]]) -> None:
    """Add the gradients of one parameter used under several names inside the step.

    Autograd would keep all of them and add them outside; here the sum is made in place, as soon
    as the next one is there, in the order autograd adds them.
    """
    graph = joint.module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for positions in tied:
        group = [(n, i) for n, i in joint.gradients if i in positions]
        group.sort(key=lambda item: order[item[0]])
        if len(group) < 2:
            continue
        total = group[0][0]
        others = {base_of(n) for n in _outputs(joint) if n is not total}
        if len(_readers(base_of(total))) > 0:
            others.add(base_of(total))
        total = _owned(joint, total, others)
        for node, _ in group[1:]:
            anchor = max(total, node, key=lambda n: _position(graph, n))
            with graph.inserting_after(anchor):
                added = graph.call_function(aten.add_.Tensor, (total, node))
            added.meta = {"val": private.like(total.meta["val"]), "seq_nr": node.meta.get("seq_nr")}
            total = added
        members = {id(n) for n, _ in group}
        joint.gradients[:] = [g for g in joint.gradients if id(g[0]) not in members]
        joint.gradients.append((total, group[0][1]))


def _position(graph: fx.Graph, node: fx.Node) -> int:
    return next(i for i, n in enumerate(graph.nodes) if n is node)


def _owned(joint: JointGraph, node: fx.Node, taken: set[fx.Node]) -> fx.Node:
    """Return the node, or a copy of it if its storage is shared or not the step's own."""
    base = base_of(node)
    own = base.op == "call_function" and base not in taken
    dense = base.meta["val"].numel() == node.meta["val"].numel() if own else False
    if own and dense:
        return node
    return _insert(joint, node, aten.clone.default, (node,), private.like(node.meta["val"]))


def _insert(
    joint: JointGraph, after: fx.Node, target: Callable, args: tuple, value: torch.Tensor
) -> fx.Node:
    graph = joint.module.graph
    anchor = after
    while anchor.next.op == "placeholder":
        anchor = anchor.next
    with graph.inserting_after(anchor):
        node = graph.call_function(target, args)
    node.meta = {"val": value, "seq_nr": after.meta.get("seq_nr")}
    return node


def _own_gradients(joint: JointGraph) -> None:
    """Make each gradient the only owner of a storage laid out as its parameter.

    Autograd would clone it otherwise, outside the plan.
    """
    placeholders = joint.placeholders
    taken = {base_of(n) for n in joint.raw_outputs if isinstance(n, fx.Node)}
    taken |= {base_of(n) for n, _ in joint.write_backs}
    result = []
    for node, position in joint.gradients:
        parameter = placeholders[position].meta["val"]
        fixed = _owned(joint, node, taken)
        if fixed.meta["val"].stride() != parameter.stride() and _is_dense(parameter):
            fixed = _insert(
                joint, fixed, _copy_like, (fixed, placeholders[position]), private.like(parameter)
            )
        taken.add(base_of(fixed))
        result.append((fixed, position))
    joint.gradients[:] = result


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda p: p[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _copy_like(source: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    """Return a copy of `source` with the strides of `layout`."""
    return torch.empty_strided(
        layout.shape, layout.stride(), dtype=source.dtype, device=source.device
    ).copy_(source)


def _own_write_backs(joint: JointGraph) -> None:
    """Make what is copied into a buffer a value of its own that nobody else keeps."""
    kept = {base_of(n) for n in joint.raw_outputs if isinstance(n, fx.Node)}
    kept |= {base_of(n) for n, _ in joint.gradients}
    forward = _ancestors(
        [n for n in joint.raw_outputs if isinstance(n, fx.Node)] + [n for n, _ in joint.write_backs]
    )
    result = []
    for written, position in joint.write_backs:
        node, base = written, base_of(written)
        read_later = any(user not in forward for user in _readers(base))
        if base.op != "call_function" or base in kept or read_later:
            node = _insert(joint, node, aten.clone.default, (node,), private.like(node.meta["val"]))
        kept.add(base_of(node))
        result.append((node, position))
    joint.write_backs[:] = result


def _readers(base: fx.Node) -> set[fx.Node]:
    """Return the ops that read a storage, directly or through views."""
    found: set[fx.Node] = set()
    waiting = list(base.users)
    while waiting:
        node = waiting.pop()
        if is_view(node):
            waiting.extend(node.users)
        elif node.op == "call_function" and not is_getitem(node):
            found.add(node)
    return found


def _ancestors(roots: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _snapshot_mutated(joint: JointGraph) -> None:
    """Let backward operators read a copy of a buffer the forward pass overwrites."""
    placeholders = joint.placeholders
    forward = _ancestors(
        [n for n in joint.raw_outputs if isinstance(n, fx.Node)] + [n for n, _ in joint.write_backs]
    )
    for _, position in joint.write_backs:
        primal = placeholders[position]
        late = [n for n in _readers(primal) if n not in forward]
        if not late:
            continue
        copy = _insert(
            joint, primal, aten.clone.default, (primal,), private.like(primal.meta["val"])
        )
        copy.meta["tightfit_forward"] = True
        rebuilt = {primal: copy}
        for node in late:
            for argument in node.all_input_nodes:
                if base_of(argument) is primal:
                    node.replace_input_with(argument, _rebuild(joint, argument, rebuilt))


def _rebuild(joint: JointGraph, view: fx.Node, rebuilt: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the same chain of views over another base."""
    if view not in rebuilt:
        source = view.all_input_nodes[0]
        base = _rebuild(joint, source, rebuilt)
        with joint.module.graph.inserting_after(view):
            node = joint.module.graph.node_copy(view, lambda n: base if n is source else n)
        rebuilt[view] = node
    return rebuilt[view]


def _erase_dead(joint: JointGraph) -> None:
    """Erase what nobody reads, random operators included.

    A random operator nobody reads still advanced the generator in eager, so it stays; and so does
    one that is asked for the step's sake.
    """
    graph = joint.module.graph
    outputs = _outputs(joint)
    tail = next(iter(reversed(graph.nodes)))
    tail.args = (tuple(outputs),)
    for node in reversed(list(graph.nodes)):
        unread = node.op == "call_function" and not node.users and node not in outputs
        kept = is_random(node) or question_of(node) is not None
        if (unread and not kept) or (node.op == "get_attr" and not node.users):
            graph.erase_node(node)
