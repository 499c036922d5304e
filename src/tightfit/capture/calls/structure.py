"""How the inputs and outputs of a call nest: pytrees, and objects of plain classes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import nn

from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.Size,
    enum.Enum,
)
"""Types that hold no tensor and do not change."""


_HEAP_TYPE = 1 << 9
"""The flag of classes that a ``class`` statement made."""


class _Fields:
    """An object on its way through a pytree; it comes out as one of its class again."""

    def __init__(self, kind: type, values: dict[str, Any]) -> None:
        self.kind = kind
        self.values = values


def _take_apart(fields: _Fields) -> tuple[list[Any], Any]:
    classes = tuple((k, v) for k, v in fields.values.items() if isinstance(v, type))
    rest = {k: v for k, v in fields.values.items() if not isinstance(v, type)}
    return list(rest.values()), (fields.kind, tuple(rest), classes)


def _put_together(values: Any, context: Any) -> Any:
    kind, names, classes = context
    result = object.__new__(kind)
    for name, value in (*zip(names, values, strict=True), *classes):
        object.__setattr__(result, name, value)
    return result


private.pytree.register_pytree_node(_Fields, _take_apart, _put_together)


FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


class _Fixed:
    """A function on its way through a pytree: part of how the inputs of a call nest."""

    def __init__(self, function: Any) -> None:
        self.function = function


private.pytree.register_pytree_node(
    _Fixed, lambda fixed: ([], fixed.function), lambda _, function: function
)


def opened(tree: Any) -> Any:
    """Return inputs with their dataclasses and plain objects made visible to pytrees.

    Functions among them are no leaves: with another function, inputs nest differently.
    """
    return _opened(tree, frozenset(), _fixed)


def _fixed(value: Any) -> Any:
    return _Fixed(value) if isinstance(value, FUNCTIONS) else value


def _opened(tree: Any, around: frozenset[int], leaf: Callable[[Any], Any]) -> Any:
    def visible(value: Any) -> Any:
        if not _may_be_opened(value) or id(value) in around:
            return leaf(value)
        inside = around | {id(value)}
        inner = {k: _opened(v, inside, leaf) for k, v in _attributes_of(value).items()}
        if dataclasses.is_dataclass(value) or all(map(is_known, private.pytree.tree_leaves(inner))):
            return _Fields(type(value), inner)
        return value

    return private.pytree.tree_map(
        visible, tree, is_leaf=lambda value: _may_be_opened(value) or _is_size(value)
    )


def _may_be_opened(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, type) or kind in private.pytree.SUPPORTED_NODES:
        return False
    return dataclasses.is_dataclass(value) or _is_plain_object(value)


def _is_plain_object(value: Any) -> bool:
    """Whether an object is nothing but its attributes, as ``copy.copy`` would make it again."""
    kind = type(value)
    return (
        all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
        and not kind.__module__.startswith("torch._")  # stand-ins of the tracer for enums
        and hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, *PLAIN))
        and not any(getattr(base, "__slots__", ()) for base in kind.__mro__)
        and not any(hasattr(kind, name) for name in ("__setstate__", "__torch_function__"))
        and all(
            getattr(kind, name, None) is getattr(object, name, None)
            for name in ("__getstate__", "__reduce__", "__reduce_ex__")
        )
    )


def _attributes_of(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return dict(vars(value))
    names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return {name: getattr(value, name) for name in names}


def is_known(leaf: Any) -> bool:
    """Whether a leaf is a tensor or a plain value."""
    return isinstance(leaf, (torch.Tensor, type, *PLAIN))


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree and how they nest."""
    return private.pytree.tree_flatten(opened(tree))


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    return private.pytree.tree_unflatten(leaves, spec)


class Arguments(msgspec.Struct, frozen=True):
    """The inputs of one call, flattened once."""

    # args, kwargs: as they were given
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[Any, ...]  # tensors and plain values
    spec: Any  # how they nest

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        leaves = (*args, *kwargs.values())
        if _FLAT.issuperset(map(type, leaves)):
            return cls(args, kwargs, leaves, flat_spec(len(args), tuple(kwargs)))
        opened_leaves, spec = flatten((args, kwargs))
        return cls(args, kwargs, tuple(opened_leaves), spec)

    @property
    def elements(self) -> int:
        """How many numbers its tensors have."""
        return sum(leaf.numel() for leaf in self.leaves if isinstance(leaf, torch.Tensor))


_FLAT = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None)})
"""Types that are always leaves: of calls with nothing else it is known how they nest."""


@functools.cache
def flat_spec(positional: int, names: tuple[str, ...] = ()) -> Any:
    """Return how the inputs of a call nest all of which are leaves."""
    return flatten(((0,) * positional, dict.fromkeys(names, 0)))[1]


@dataclass(frozen=True)
class Structure:
    """An output without its tensors."""

    spec: Any  # how its leaves nest
    leaves: tuple[Any, ...]  # values other than tensors; None where a tensor is
    positions: tuple[int, ...]  # where the tensors are
    which: tuple[int, ...]  # which tensor is in each of these places: a tensor may be in several
    numbers: tuple[int, ...] = ()  # places of tensors that hold a number of the step

    @cached_property
    def _is_tuple(self) -> bool:
        """Whether it is a tuple of nothing but tensors."""
        is_flat = len(self.positions) == len(self.leaves) and not self.numbers
        return is_flat and self.spec == flatten((0,) * len(self.leaves))[1]

    @property
    def constants(self) -> tuple[Any, ...]:
        """Its values other than tensors."""
        return tuple(x for i, x in enumerate(self.leaves) if i not in self.positions)

    def filled(self, tensors: Sequence[Any]) -> Any:
        if self._is_tuple:
            return tuple([tensors[which] for which in self.which])
        leaves = list(self.leaves)
        for position, which in zip(self.positions, self.which, strict=True):
            tensor = tensors[which]
            leaves[position] = tensor.item() if position in self.numbers else tensor
        return unflatten(leaves, self.spec)


def structure_of(output: Any, where: str) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors of an output, each of them once, and the rest of it.

    Raises `CaptureError` if it holds an object that may hold tensors but cannot be looked into.
    """
    leaves, spec = private.pytree.tree_flatten(
        _opened(output, frozenset(), lambda leaf: leaf), is_leaf=_is_size
    )
    numbers = tuple(i for i, x in enumerate(leaves) if isinstance(x, torch.SymFloat | torch.SymInt))
    for position in numbers:
        leaves[position] = _as_tensor(leaves[position])
    for leaf in leaves:
        if not is_known(leaf):
            raise CaptureError(
                f"{where} returns a {type(leaf).__name__}: a planned call returns tensors and "
                "plain values (numbers, text, None) in tuples, lists, dicts, named tuples, "
                "dataclasses and objects that hold nothing else. Way out: return its tensors, or "
                "register the class with torch.utils._pytree"
            )
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    places: dict[int, int] = {}
    which = tuple(places.setdefault(id(leaves[i]), len(places)) for i in positions)
    tensors = [leaves[positions[which.index(place)]] for place in range(len(places))]
    rest = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
    return tensors, Structure(spec, rest, positions, which, numbers)


def _as_tensor(number: Any) -> torch.Tensor:
    """Return a number of a traced step as a tensor that holds it exactly."""
    precision = torch.float64 if isinstance(number, torch.SymFloat) else torch.int64
    return torch.scalar_tensor(number, dtype=precision)
