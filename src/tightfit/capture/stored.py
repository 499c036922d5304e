"""The trace of a handed graph in memory and in a file, by the key of the graph and its inputs.

A handed graph says all that it runs: no code is looked at. Its key must hold the graph itself, its
constants, the layouts of its inputs, and properties of PyTorch and this machine.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx, nn

from tightfit.capture.calls.signature import (
    input_signature,
    modes_and_settings,
    tensor_signature,
)
from tightfit.capture.calls.structure import flatten
from tightfit.capture.handed import HandedGraphs
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.libraries import is_library, is_ours
from tightfit.capture.recall.installation import installation, memory_of, sees_operators
from tightfit.capture.recall.packing import KeptGraph, kept_graph, traced_again
from tightfit.capture.recall.recent import RecentTraces
from tightfit.capture.recall.trace_files import (
    ignoring_errors,
    note_use,
    read_trace,
    trace_folder,
    write_trace,
)
from tightfit.capture.recall.values import NotKept, bytes_of, digest, packed
from tightfit.capture.trace.strides import TrueStrides
from tightfit.capture.traced_call import TracedCall
from tightfit.torch_private import core as private
from tightfit.torch_private import traces

_FORMAT = 1
_SUFFIX = ".handed.gz"
_LARGEST_CONSTANT = 1 << 20


_RECENT = RecentTraces(most_bytes=32 << 20)


class StoredGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    graph: KeptGraph


@dataclass(frozen=True)
class StoredTrace:
    """The trace that was stored for a call of a handed graph."""

    call: TracedCall  # about to be traced
    key: str  # a digest of all that the trace follows from
    in_files: bool  # whether other processes share it

    @classmethod
    def of(
        cls, call: TracedCall, strides: TrueStrides | None, *, in_files: bool
    ) -> StoredTrace | None:
        """Return the stored trace of a call; None if no trace of it can be stored."""
        with ignoring_errors("no trace is stored"):
            return cls(call, digest(packed(_described(call, strides))), in_files)
        return None

    def find(self) -> JointGraph | None:
        with ignoring_errors(f"{self._path} is not used"):
            kept = self._kept()
            if kept is None:
                return None
            joint = traced_again(kept)
            if joint.decisions.hold(self.call.leaves, self.call.modules):
                return joint
        return None

    def _kept(self) -> KeptGraph | None:
        recent = _RECENT.find(self.key)
        if recent is not None:
            return msgspec.msgpack.decode(recent, type=KeptGraph)
        if not (self.in_files and self._path.exists()):
            return None
        note_use(self._path)
        kept = read_trace(self._path, StoredGraph, _FORMAT).graph
        _RECENT.keep(self.key, msgspec.msgpack.encode(kept))
        return kept

    def keep(self, joint: JointGraph) -> None:
        """Store a trace for models that are fitted later, and for other processes."""
        with ignoring_errors("no trace is stored"):
            kept = kept_graph(joint)
            _RECENT.keep(self.key, msgspec.msgpack.encode(kept))
            if self.in_files:
                write_trace(self._path, StoredGraph(_FORMAT, kept))

    @property
    def _path(self) -> Path:
        return trace_folder() / f"{self.key}{_SUFFIX}"


def graph_key(graphs: HandedGraphs, number: int) -> Any:
    """Return a key, equal for graphs that run the same, on members of the same names."""
    graph = graphs.graph(number)
    try:
        described = packed(
            (graphs.places(number), sorted(graph.returned_with_loss), _nodes(graph.module))
        )
    except NotKept:
        return id(graph)
    return digest(described)


def _described(call: TracedCall, strides: TrueStrides | None) -> tuple[Any, ...]:
    """Return all that the trace of a call follows from, as plain values.

    Raises `NotKept` if something of it means nothing in another process.
    """
    graphs, number = call.function, call.args[-1]
    if not isinstance(graphs, HandedGraphs):
        raise NotKept("a graph with an input for each use of an input")
    graph = graphs.graph(number)
    if graph.calls_opaque or graph.numbers:
        raise NotKept("modules that run eagerly, or numbers that change")
    replaced = list(traces.patched(()))
    if sees_operators() or any(_is_of_a_user(held) for _, held in replaced):
        raise NotKept("a mode of PyTorch, hooks of all modules, or functions in place of its own")
    leaves, spec = flatten((call.args[:-1], call.kwargs))
    tensors = {name: t for top, m in call.modules.items() for name, t in _tensors_of(top, m)}
    given = [*tensors.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    identities = {id(tensor): i for i, tensor in enumerate(given)}
    return (
        installation(given),
        [(name, getattr(held, "__qualname__", "")) for name, held in replaced],
        modes_and_settings(),
        (
            call.loss_alone,
            sorted(graph.returned_with_loss),
            call.numbers,
            sorted(call.detached_outputs),
        ),
        sorted((strides or {}).items()),
        input_signature(leaves, spec),
        [(name, tensor_signature(tensor)) for name, tensor in tensors.items()],
        [identities[id(tensor)] for tensor in given],
        memory_of(given),
        [(tensor.is_leaf, identities.get(id(private.viewed(tensor)))) for tensor in given],
        graphs.places(number),
        _nodes(graph.module),
    )


def _tensors_of(top: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module, by their places."""
    for name, tensor in module.named_parameters(remove_duplicate=False):
        yield f"{top} {name}", tensor
    for name, tensor in module.named_buffers(remove_duplicate=False):
        yield f"{top} {name} (buffer)", tensor


def _nodes(module: fx.GraphModule) -> list[Any]:
    """Return the operations of a graph and their operands."""
    places = {node: i for i, node in enumerate(module.graph.nodes)}
    return [
        (node.op, _target(module, node), packed(node.args, places), packed(node.kwargs, places))
        for node in places
    ]


def _target(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return the function that a node calls or the object that it fetches.

    Raises `NotKept` if it is neither PyTorch's nor Python's own function, a small tensor, or
    another graph.
    """
    if node.op in ("placeholder", "output"):
        return None
    if node.op == "call_method":
        return node.target
    if node.op == "call_function":
        name = traces.name_of_function(node.target)
        if name is None:
            raise NotKept(f"{node.target}, a function that is neither PyTorch's nor Python's")
        return name
    held = functools.reduce(getattr, str(node.target).split("."), module)
    if node.op == "get_attr" and isinstance(held, fx.GraphModule):
        return _nodes(held)
    if node.op == "get_attr" and _is_constant(held):
        return [tensor_signature(held), memory_of([held]), digest(bytes_of(held))]
    raise NotKept(f"{node.target}, which the graph holds")


def _is_constant(held: Any) -> bool:
    is_plain = type(held) is torch.Tensor and not held.requires_grad
    return is_plain and held.device.type == "cpu" and held.nbytes <= _LARGEST_CONSTANT


def _is_of_a_user(held: Any) -> bool:
    """Whether the replacement of a function of PyTorch's may be anybody's."""
    inner = getattr(held, "__wrapped__", held)
    if isinstance(inner, types.FunctionType):
        if is_library(inner.__code__.co_filename):
            return False
        module = inner.__globals__.get("__name__")
    else:
        module = getattr(inner, "__module__", None) or type(inner).__module__
    return module != "typing_extensions" and not is_ours(module)
