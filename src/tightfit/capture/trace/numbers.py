"""Trace a step again with the numbers that it reads as inputs, and see that it is the same step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from tightfit.capture.decisions.numbers import Numbers, is_carried, number_carried
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import note_kept_forward
from tightfit.capture.trace.strides import TrueStrides
from tightfit.capture.trace.trace import trace
from tightfit.capture.traced_call import TracedCall
from tightfit.torch_private import core as private

aten = torch.ops.aten

_MOST_ATTEMPTS = 6
_ALL = range(sys.maxsize)


def trace_with_numbers(call: TracedCall, strides: TrueStrides | None = None) -> JointGraph:
    """Trace the step of a call; numbers that it only computes with become inputs if so wished.

    `call`, `strides`: as of `trace`. Raises `CaptureError` as `trace` does.
    """
    joint = trace(call, strides)
    if call.numbers and any(not isinstance(v, bool) for v in joint.decisions.values):
        joint = _with_inputs(call, joint, strides)
    return joint


def _with_inputs(call: TracedCall, joint: JointGraph, strides: TrueStrides | None) -> JointGraph:
    """Return the step with as many of its numbers as inputs as decide nothing."""
    deciding: frozenset[int] = frozenset()
    for _ in range(_MOST_ATTEMPTS):
        numbers = Numbers(deciding)
        try:
            found = trace(call, strides, numbers)
        except Exception as error:  # a symbol is no number: user code may fail on it in any way
            deciders = numbers.deciders(private.symbols_asked_for(error))
        else:
            deciders = numbers.deciders(_in_sizes(found))
            if not deciders:
                _settle(found.module.graph, numbers)
                placed = numbers.writes.placed
                plain = trace(call, strides, Numbers(_ALL, placed)) if placed else joint
                return found if _is_same(plain.module.graph, found.module.graph) else joint
        if deciders <= deciding:
            break
        deciding |= deciders
    return joint


def _in_sizes(joint: JointGraph) -> Iterator[str]:
    """Yield the numbers that decide how large something is."""
    for node in joint.module.graph.nodes:
        for value in private.pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                yield from private.symbols_in(value)


def _settle(graph: fx.Graph, numbers: Numbers) -> None:
    """Give the nodes of numbers the numbers of this call; they belong to the forward."""
    marks: dict[float, Any] = {}
    for node in list(graph.nodes):
        if is_carried(node):
            number, mark = number_carried(node)
            marks[mark] = number
            graph.erase_node(node)
            continue
        if marks:
            node.args = private.pytree.tree_map(
                lambda x: marks.get(x, x) if isinstance(x, float) else x, tuple(node.args)
            )
        value = node.meta.get("val")
        if node.op == "call_function" and not isinstance(value, torch.Tensor):
            names = private.symbols_in(value)
            if names:
                node.meta["val"] = _value_of(node, numbers, names)
                note_kept_forward(node)


def _value_of(node: fx.Node, numbers: Numbers, names: frozenset[str]) -> Any:
    if node.target is aten._local_scalar_dense.default:
        return numbers.value_of(names)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_same(concrete: fx.Graph, symbolic: fx.Graph) -> bool:
    """Whether two traces run the same operators on the same tensors and numbers.

    Code that asks for the class of a number would take another branch with a symbol.
    """
    one, other = list(_operators(concrete)), list(_operators(symbolic))
    places = {node: i for i, node in enumerate(one)}, {node: i for i, node in enumerate(other)}
    return len(one) == len(other) and all(
        a.op == b.op
        and (a.target == b.target or a.op != "call_function")
        and _arguments(a, places[0]) == _arguments(b, places[1])
        for a, b in zip(one, other, strict=True)
    )


def _operators(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes that make tensors: none that computes with numbers."""
    for node in graph.nodes:
        if not _holds_number(node) and not isinstance(node.meta.get("val"), int | float):
            yield node


def _holds_number(node: fx.Node) -> bool:
    """Whether a node makes a tensor of a number of the step, to be returned."""
    return node.target is aten.scalar_tensor.default and isinstance(node.args[0], fx.Node)


def _arguments(node: fx.Node, places: Mapping[fx.Node, int]) -> list[Any]:
    """Return the arguments of a node: operators as their places, numbers with their classes."""
    found: list[Any] = []
    for leaf in private.pytree.tree_leaves((list(node.args), dict(node.kwargs))):
        if isinstance(leaf, fx.Node) and leaf in places:
            found.append(("node", places[leaf]))
        elif node.op != "output" or not isinstance(leaf, fx.Node):
            value = leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
            found.append((type(value).__name__, repr(value)))
    return found
