"""The attributes of modules, as far as plans depend on them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tightfit.capture.calls.structure import FUNCTIONS, PLAIN

__all__ = ["FLAGS", "KEPT_APART", "Attributes", "Identity", "ReadAttributes", "same_attributes"]

_BY_IDENTITY = (torch.Generator, torch.Tensor, *FUNCTIONS, type)
_CONTAINERS = (tuple, list, dict, set)
KEPT_APART = frozenset(nn.Module().__dict__) | {"forward"}
"""What every module has, looked at by itself."""
FLAGS = ("training", "_is_full_backward_hook")  # of every module, and two make a tuple
_UNKNOWN = "holds more than plain values"


@dataclass(frozen=True)
class ReadAttributes:
    """Which attributes of modules code can have read: what lies in the others does not matter.

    Parameters
    ----------
    names : frozenset of str
        Names that were loaded, of whatever object.
    kinds : frozenset of type
        The classes of modules that this is known of; of others all attributes may be read.
    """

    names: frozenset[str]
    kinds: frozenset[type]

    def joined(self, other: ReadAttributes | None) -> ReadAttributes | None:
        """Return what two pieces of code can have read; None: any attribute."""
        if other is None:
            return None
        return ReadAttributes(self.names | other.names, self.kinds | other.kinds)


class Attributes:
    """The attributes of a module that matter, as they were when it was looked at.

    Parameters
    ----------
    own : dict
        All attributes of the module.
    left_out : frozenset of str
        Names of those that do not matter.
    with_tensors : bool
        Whether tensors do: not where what was read is compared by itself (`capture.reads`).

    Attributes
    ----------
    part : tuple
        What matters of them.
    record : tuple
        The same for the core to compare: how many there are; names, types and plain values.
    are_plain : bool
        Whether the core can compare them all.
    """

    def __init__(
        self, own: dict[str, Any], left_out: frozenset[str], *, with_tensors: bool = True
    ) -> None:
        names = [key for key in own if key not in left_out]
        plain = [key for key in names if _is_plain(own[key])]
        looked_at = (*FLAGS, *names)
        of_value = {*FLAGS, *plain}
        types = tuple(type(own[key]) for key in looked_at)
        values = tuple(own[key] if key in of_value else ... for key in looked_at)
        self.record = len(own), looked_at, types, values
        self._others = [
            (key, seen)
            for key in names
            if key not in KEPT_APART
            and key not in of_value
            and (with_tensors or not _is_data(own[key]))
            and (seen := _seen_attribute(own[key])) is not None
        ]
        self.are_plain = not self._others
        self.part = (
            tuple((key, own[key]) for key in (*FLAGS, *plain)),
            tuple((key, seen) for key, seen in self._others if seen != _UNKNOWN),
        )

    def others_hold(self, own: dict[str, Any]) -> bool:
        """Whether those are still the same that are not plain."""
        return all(_seen_attribute(own[key]) == seen for key, seen in self._others)


def _is_plain(value: Any) -> bool:
    """Whether a value cannot change inside: plain, or a tuple of nothing else."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return _counts_by(type(value)) == "value"


def _is_data(value: Any) -> bool:
    return type(value) is torch.Tensor and not value.requires_grad


def _seen_attribute(value: Any) -> Any:
    """Return what tells an attribute from another one; None: it does not matter here."""
    match _counts_by(type(value)):
        case "identity":
            return Identity(value)
        case "contents":
            contents = _plain_contents(value)
            return _UNKNOWN if contents is None else contents
        case _:
            return None


class Identity:
    """Equal for one and the same object; another one that takes its address later is another."""

    __slots__ = ("_address", "_object")

    def __init__(self, value: Any) -> None:
        self._address = id(value)
        try:
            self._object = weakref.ref(value)
        except TypeError:  # it cannot be told when it dies, so it must not
            self._object = functools.partial(lambda kept: kept, value)

    @property
    def value(self) -> Any:
        """The object, None once it is gone."""
        return self._object()

    def __hash__(self) -> int:
        return self._address

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._address != other._address:
            return False
        value = self._object()
        return value is not None and value is other._object()


def _plain_contents(value: Any) -> Any:
    """Return what a container holds, hashable; None if there is more than plain values in it."""
    elements = value.items() if isinstance(value, dict) else value
    contents: list[Any] = []
    for element in elements:
        match _counts_by(type(element)):
            case "value":
                contents.append(element)
            case "contents":
                contents.append(_plain_contents(element))
                if contents[-1] is None:
                    return None
            case _:
                return None
    held = frozenset(contents) if isinstance(value, set) else tuple(contents)
    return type(value), held


@functools.cache
def _counts_by(kind: type) -> Literal["value", "identity", "contents", "nothing"]:
    """Return what tells attributes of a class apart; asking of each anew takes long."""
    if issubclass(kind, PLAIN):
        return "value"
    if issubclass(kind, _BY_IDENTITY):
        return "identity"
    return "contents" if issubclass(kind, _CONTAINERS) else "nothing"


def same_attributes(one: Mapping[str, nn.Module], other: Mapping[str, nn.Module]) -> bool:
    """Whether modules of the same signature also agree in every further attribute.

    A signature tells whether one module has changed; it leaves out attributes that would be dear to
    compare at every call, in which two modules of a class may well differ. Attributes whose names
    begin with two underscores are what tools such as FSDP2 keep in a module.
    """
    return one.keys() == other.keys() and all(
        _same(_further_attributes(a), _further_attributes(b))
        for name, top in one.items()
        for a, b in zip(top.modules(), other[name].modules(), strict=True)
    )


def _further_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in KEPT_APART and not name.startswith("__")
    }


def _same(one: Any, other: Any) -> bool:
    """Whether two attributes are one object, equal plain data, or such things in containers."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, PLAIN) and one == other
