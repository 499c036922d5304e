"""Properties of a traced operator: views, aliases, randomness, tuple outputs.

Facts that neither the operator's schema nor its fake tensors tell are noted on its node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from tightfit.torch_private import core as private

aten = torch.ops.aten

_VIEW = "tightfit_view"
_RANDOM = "tightfit_random"
_FORWARD = "tightfit_forward"
_TERMS = "tightfit_terms"


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def note_views(graph: fx.Graph) -> None:
    """Note, from the fake tensors of a trace, which nodes only view their first input.

    The schema does not tell it of `_unsafe_view`, and once a copy has been dropped the fake tensors
    no longer tell it either. So it is noted before anything is rewritten.
    """
    for node in graph.nodes:
        if node.op == "call_function" and not is_getitem(node):
            node.meta[_VIEW] = _shares_storage(node)


def is_view(node: fx.Node) -> bool:
    """Whether a node only gives another geometry to the storage of its first tensor argument.

    A getitem of a multi-output view is a view too.
    """
    if node.op != "call_function":
        return False
    if is_getitem(node):
        return is_view(node.args[0])  # type: ignore[arg-type]
    return node.meta.get(_VIEW, False)


def _shares_storage(node: fx.Node) -> bool:
    outputs = [t for t in flat_outputs(node) if isinstance(t, torch.Tensor)]
    if not outputs or writes_in_place(node) or not node.all_input_nodes:
        return False
    inputs = {
        private.storage_key(t)
        for t in flat_outputs(node.all_input_nodes[0])
        if isinstance(t, torch.Tensor)
    }
    return all(private.storage_key(t) in inputs for t in outputs)


def writes_in_place(node: fx.Node) -> bool:
    """Whether an operator writes its result over its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def is_op(node: fx.Node) -> bool:
    """Whether a node computes something: neither a view nor a getitem."""
    return node.op == "call_function" and not is_getitem(node) and not is_view(node)


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose storage a node shares: an op, a getitem of an op, a placeholder."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def flat_outputs(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def is_without_gaps(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill a stretch of memory, in any order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda p: p[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def fills_storage(tensor: torch.Tensor) -> bool:
    return is_without_gaps(tensor) and storage_bytes(tensor) == tensor.nbytes


def storage_bytes(tensor: Any) -> int:
    """Return the bytes of the storage of a (fake) tensor; 0 for anything else."""
    return tensor.untyped_storage().nbytes() if isinstance(tensor, torch.Tensor) else 0


def is_random(node: fx.Node) -> bool:
    noted = node.meta.get(_RANDOM)
    return draws(node.target, node.args, node.kwargs) if noted is None else noted


def note_random(node: fx.Node, drawing: bool) -> None:
    """Note of a node whether it draws random numbers, in place of its schema."""
    node.meta[_RANDOM] = drawing


def is_traced_in_backward(node: fx.Node) -> bool:
    """Whether autograd ran a node while it computed gradients."""
    return node.meta.get("partitioner_tag") == "is_backward"


def note_kept_forward(node: fx.Node) -> None:
    """Note of a node added later that it belongs to the forward, though only backward reads it."""
    node.meta[_FORWARD] = True


def is_kept_forward(node: fx.Node) -> bool:
    """Whether a node belongs to the forward though nothing that the forward returns needs it."""
    return node.meta.get(_FORWARD, False)


def note_terms(node: fx.Node, count: int) -> None:
    """Note of a gradient how many terms autograd has added up in it."""
    node.meta[_TERMS] = count


def terms_of(node: fx.Node) -> int:
    """Return how many terms autograd has added up in a gradient; 1 for any other node."""
    return node.meta.get(_TERMS, 1)


def draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator of PyTorch draws random numbers with these arguments.

    Attention is tagged as random even without dropout; its argument decides.
    """
    if not isinstance(operator, private.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    if "scaled_dot_product" in operator.name():
        names = [argument.name for argument in operator._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return bool(given.get("dropout_p", 0.0))
    if operator.overloadpacket is aten.native_dropout:
        return bool(args[2]) and bool(args[1])
    return True


def forward_nodes(graph: fx.Graph, results: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes of a step that run before its backward.

    `results`: what the forward returns and writes back. Random operators of the forward run even if
    nothing reads them.
    """
    kept = [n for n in graph.nodes if is_kept_forward(n)]
    drawn = [n for n in graph.nodes if is_op(n) and is_random(n) and not is_traced_in_backward(n)]
    return ancestors_of([*results, *kept, *drawn])


def ancestors_of(
    roots: Iterable[fx.Node],
    reads: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """Return some nodes and all that they are computed from.

    `reads`: the nodes that a node is computed from; unless given, all that it reads.
    """
    found: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(reads(node))
    return found
