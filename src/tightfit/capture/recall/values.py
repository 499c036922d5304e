"""Plain values of a trace in the form of a file: tagged lists around numbers and texts."""

from __future__ import annotations

import collections
import enum
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import fx

from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.decisions.reads import Read, TapeSlot, TapeStep
from tightfit.torch_private import core as private
from tightfit.torch_private import traces

_LARGEST = 1 << 63
_NAMESPACES = frozenset({"aten", "prims"})
"""Of PyTorch's own operators: the names of others do not define their meaning."""
_RECORDS = {kind.__name__: kind for kind in (Geometry, Read, TapeSlot, TapeStep)}
_NAMED = (torch.dtype, torch.memory_format, torch.layout)


class NotKept(Exception):
    """A trace holds something that no file can give back."""


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the numbers of a tensor on the CPU, in the order of its dimensions."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest(value: Any) -> str:
    """Return a hash of a packed value."""
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=20).hexdigest()


def packed(value: Any, nodes: Mapping[fx.Node, int] | None = None) -> Any:
    """Return a value as a file can hold it; nodes as their places.

    Raises `NotKept` if it is no plain value.
    """

    def inner(value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes):
            return value
        if kind is int and -_LARGEST <= value < _LARGEST:
            return value
        tagged = _tagged(value, inner)
        if tagged is None and isinstance(value, fx.Node) and nodes is not None:
            return ["node", nodes[value]]
        if tagged is None:
            raise NotKept(f"a {kind.__module__}.{kind.__qualname__}")
        return tagged

    return inner(value)


def _tagged(value: Any, inner: Callable[[Any], Any]) -> list[Any] | None:
    kind = type(value)
    if kind in (tuple, list, torch.Size, frozenset, slice):
        items = (value.start, value.stop, value.step) if kind is slice else value
        return [kind.__name__, *map(inner, items)]
    if issubclass(kind, dict) and kind.__name__ in ("dict", "immutable_dict"):
        return ["dict", *([inner(key), inner(item)] for key, item in value.items())]
    if isinstance(value, list | tuple) and kind.__name__ == "immutable_list":
        return ["list", *map(inner, value)]
    if isinstance(value, _NAMED):
        return ["torch", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if value is ...:
        return ["ellipsis"]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if isinstance(value, private.OpOverload):
        return _operator(value)
    if isinstance(value, private.pytree.TreeSpec):
        return ["tree", *map(inner, (value.type, value.context, value.children()))]
    if isinstance(value, enum.Enum):
        return ["enum", inner(kind), value.name]
    if isinstance(value, type) or value is collections.namedtuple:  # so trees name their kinds
        return _class(value)
    if kind.__name__ in _RECORDS:
        return [kind.__name__, *(inner(item) for item in vars(value).values())]
    return None


def _operator(value: Any) -> list[Any]:
    if value.namespace not in _NAMESPACES:
        raise NotKept(f"{value}, an operator that is not PyTorch's")
    return ["operator", value.name()]


def _class(kind: Any) -> list[Any]:
    names = kind.__module__, kind.__qualname__
    if _class_named(*names) is not kind:
        raise NotKept(f"the class {'.'.join(names)}, which is not found by its name")
    return ["class", *names]


def _class_named(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def unpacked(value: Any, nodes: list[fx.Node] | None = None) -> Any:
    """Return a value that was packed.

    Raises `NotKept` if something that it names is not there.
    """
    if not isinstance(value, list):
        return value
    tag, *items = value
    if tag == "node":
        assert nodes is not None
        return nodes[items[0]]
    if tag in _FROM_TEXT:
        return _FROM_TEXT[tag](*items)
    inner = [unpacked(item, nodes) for item in items if tag != "dict"]
    if tag == "dict":
        return {unpacked(key, nodes): unpacked(item, nodes) for key, item in items}
    return _FROM_ITEMS[tag](inner)


def _operator_named(name: str) -> Any:
    try:
        return traces.operator_named(name)
    except AttributeError as error:
        raise NotKept(f"{name}, which is not there") from error


def _known_class(module: str, name: str) -> Any:
    found = _class_named(module, name)
    if not (isinstance(found, type) or found is collections.namedtuple):
        raise NotKept(f"the class {module}.{name}, which is not there")
    return found


_FROM_TEXT: dict[str, Callable[..., Any]] = {
    "torch": lambda name: getattr(torch, name),
    "device": torch.device,
    "complex": complex,
    "ellipsis": lambda: ...,
    "operator": _operator_named,
    "class": _known_class,
}
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "Size": torch.Size,
    "frozenset": frozenset,
    "slice": lambda items: slice(*items),
    "tree": lambda items: traces.tree_of(*items),
    "enum": lambda items: items[0][items[1]],
    **{name: lambda items, kind=kind: kind(*items) for name, kind in _RECORDS.items()},
}
