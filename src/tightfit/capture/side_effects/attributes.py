"""Tensors that a forward leaves in attributes of its modules: further results of the step.

`self.attention = weights`, a head for deep supervision put into a list, a state `(h, c)` that the
next call starts from: every planned forward leaves what it computed there, as the plain one does.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = [
    "Kept",
    "KeptTensors",
    "LeftTensors",
    "WithKept",
    "forget",
    "holders",
    "put",
    "refuse_left",
    "traced_places",
    "with_kept",
]

Kept: TypeAlias = tuple[str, str, Any]
"""Name of a module, of its attribute, and where in that: None for all of it."""

_ALL = "all items"
"""In the place of a key: what a list or a deque holds, in which the number of items changed."""
_BOOKKEEPING = frozenset(nn.Module().__dict__) | {"forward"}
_CHANGING = (list, dict, collections.deque)
_NESTED = (tuple, list, dict, collections.deque)
_MISSING = object()


@dataclass
class WithKept:
    """The output of a forward, and what it leaves behind."""

    output: Any
    kept: dict[Kept, Any]


def with_kept(output: Any, kept: Mapping[Kept, Any]) -> Any:
    """Return the output of a forward with what more it leaves behind."""
    if not kept:
        return output
    if isinstance(output, WithKept):
        return WithKept(output.output, {**output.kept, **kept})
    return WithKept(output, dict(kept))


def put(output: Any, modules: Mapping[str, nn.Module]) -> Any:
    """Leave tensors where the forward would have, if it leaves any; return its output."""
    if not isinstance(output, WithKept):
        return output
    for (name, attribute, key), value in output.kept.items():
        held = _module(modules, name).__dict__
        if key is None:
            held[attribute] = value
        elif key is _ALL:
            held[attribute].clear()
            held[attribute].extend(value)
        else:
            held[attribute][key] = value
    return output.output


def forget(modules: Mapping[str, nn.Module], places: Iterable[Kept]) -> None:
    """Let go of what the last forward left: the next one's plan counts only its own.

    What lies there until then looks the same but holds one number.
    """
    for name, attribute, key in places:
        held = _module(modules, name).__dict__
        holder, place = (held, attribute) if key is None else (held[attribute], key)
        left = holder[place] if key is not None else holder.get(place)
        if isinstance(left, torch.Tensor):
            holder[place] = left.new_empty(()).expand(left.shape) if left.numel() else left


def holders(places: Iterable[Kept], modules: Mapping[str, nn.Module]) -> frozenset[tuple[int, Any]]:
    """Return the dict or list of each place by its id, and the key in it."""
    found: set[tuple[int, Any]] = set()
    for name, attribute, key in places:
        held = _module(modules, name).__dict__
        found.add((id(held), attribute) if key is None else (id(held[attribute]), key))
    return frozenset(found)


class LeftTensors(CaptureError):
    """A traced forward has left what it computed in attributes of its modules."""


def traced_places(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the names of the attributes of modules that hold traced tensors."""
    return frozenset(
        ".".join(part for part in (prefix, name, attribute) if part)
        for prefix, top in modules.items()
        for name, module in top.named_modules()
        for attribute, value in module.__dict__.items()
        if attribute not in _BOOKKEEPING and _holds_traced(value)
    )


def refuse_left(modules: Mapping[str, nn.Module], before: frozenset[str]) -> None:
    """Raise if a traced forward has left tensors in attributes: no more need be traced then.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        The modules it uses.
    before : set of str
        Their `traced_places` when it began.

    Raises
    ------
    LeftTensors
        Names one of them.
    """
    left = traced_places(modules) - before
    if left:
        raise LeftTensors(f"the forward pass leaves a tensor in {min(left)}", cause="state")


class KeptTensors:
    """A forward whose traced result tells what it leaves in attributes; these are put back.

    Parameters
    ----------
    function : callable
        The forward.
    modules : mapping of str to nn.Module
        The modules it uses.
    """

    def __init__(self, function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> None:
        self.places: frozenset[Kept] = frozenset()
        self._function = function
        self._modules = modules
        self._watched: frozenset[Kept] = frozenset()
        self._read: frozenset[Kept] = frozenset()

    def __call__(self, *args: Any, **kwargs: Any) -> WithKept:
        """Run the forward."""
        before = {
            f"{prefix}.{name}".rstrip("."): (module, _snapshot(module))
            for prefix, top in self._modules.items()
            for name, module in top.named_modules()
        }
        watched = {place for place in self.places if place[2] is None}
        with _FirstAccess(self._modules, watched) as access:
            output = self._function(*args, **kwargs)
        kept: dict[Kept, Any] = {}
        if private.is_tracing():
            for name, (module, attributes) in before.items():
                kept |= _taken_out(name, module.__dict__, attributes)
            self.places = frozenset(kept)
            self._watched, self._read = frozenset(watched), access.read
        return WithKept(output, kept)

    def unread(self, inputs: frozenset[int]) -> frozenset[Kept]:
        """Return where tensors are left that the forward itself does not read.

        Parameters
        ----------
        inputs : frozenset of int
            Ids of the tensors that it has used though they belong to nobody.
        """
        written = {place for place in self.places & self._watched if place not in self._read}
        for name, attribute, key in self.places:
            if key is not None and key is not _ALL:
                now = _module(self._modules, name).__dict__[attribute][key]
                if isinstance(now, torch.Tensor) and id(now) not in inputs:
                    written.add((name, attribute, key))
        return frozenset(written)


class _FirstAccess:
    """A context that tells which attributes are read before they are written.

    Classes tell: a data descriptor of theirs goes before what lies in an object.
    """

    def __init__(self, modules: Mapping[str, nn.Module], places: Iterable[Kept]) -> None:
        self._places = {(id(_module(modules, p[0])), p[1]): p for p in places}
        self._classes = {(type(_module(modules, p[0])), p[1]) for p in places}
        self._before: list[tuple[type, str, Any]] = []
        self._written: set[tuple[int, str]] = set()
        self._read: set[Kept] = set()

    @property
    def read(self) -> frozenset[Kept]:
        """The places that were read first."""
        return frozenset(self._read)

    def note(self, module: nn.Module, name: str, *, writes: bool) -> None:
        """Note that an attribute was used."""
        place = id(module), name
        if writes:
            self._written.add(place)
        elif place not in self._written and place in self._places:
            self._read.add(self._places[place])

    def __enter__(self) -> _FirstAccess:
        for kind, name in self._classes:
            self._before.append((kind, name, vars(kind).get(name, _MISSING)))
            setattr(kind, name, _Watched(name, self, getattr(kind, name, _MISSING)))
        return self

    def __exit__(self, *_: Any) -> None:
        for kind, name, before in self._before:
            if before is _MISSING:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


class _Watched:
    """Stands for an attribute in a class, and tells of each use."""

    def __init__(self, name: str, access: _FirstAccess, default: Any) -> None:
        self._name = name
        self._access = access
        self._default = default

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is not None:
            self._access.note(module, self._name, writes=False)
        held = {} if module is None else module.__dict__
        value = held.get(self._name, self._default)
        if value is _MISSING:
            raise AttributeError(self._name)
        return value

    def __set__(self, module: Any, value: Any) -> None:
        self._access.note(module, self._name, writes=True)
        module.__dict__[self._name] = value

    def __delete__(self, module: Any) -> None:
        self._access.note(module, self._name, writes=True)
        del module.__dict__[self._name]


def _module(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    prefix, _, path = name.partition(".")
    return modules[prefix].get_submodule(path)


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Return the attributes; of lists and dicts what they hold."""
    return {
        key: (value, dict(_elements(value)) if isinstance(value, _CHANGING) else {})
        for key, value in module.__dict__.items()
        if key not in _BOOKKEEPING
    }


def _elements(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _taken_out(name: str, now: dict[str, Any], before: dict[str, Any]) -> dict[Kept, Any]:
    """Return the traced tensors that are new, and put back what was in their places."""
    kept: dict[Kept, Any] = {}
    for attribute in [key for key in now if key not in _BOOKKEEPING]:
        value, (old, elements) = now[attribute], before.get(attribute, (_MISSING, {}))
        in_place = value is old and isinstance(value, list | collections.deque)
        if in_place and _is_rearranged(value, elements):
            kept[name, attribute, _ALL] = [_carried(name, attribute, x) for x in value]
            value.clear()
            value.extend(elements.values())
        if value is old and isinstance(value, _CHANGING):
            for key, element in list(_elements(value)):
                if key in elements and element is not elements[key] and _holds_traced(element):
                    kept[name, attribute, key] = _carried(name, attribute, element)
                    value[key] = elements[key]
        elif value is not old and _holds_traced(value):
            kept[name, attribute, None] = _carried(name, attribute, value)
            if old is _MISSING:
                del now[attribute]
            else:
                now[attribute] = old
    return kept


def _is_rearranged(value: Any, before: dict[Any, Any]) -> bool:
    """Whether a list holds what was computed, and other changes than that in fixed places.

    One that grows without a bound (no deque with one) would ask for another plan in every call.
    """
    if len(value) != len(before) and getattr(value, "maxlen", None) is None:
        return False
    if len(value) == len(before) and all(
        element is before[i] or _holds_traced(element) for i, element in enumerate(value)
    ):
        return False
    return _holds_traced(value)


def _holds_traced(value: Any) -> bool:
    """Whether a value is a tensor that was computed, or a container with one."""
    if isinstance(value, torch.Tensor):
        return private.is_traced(value)
    if not isinstance(value, _NESTED):
        return False
    return any(_holds_traced(element) for _, element in _elements(value))


def _carried(name: str, attribute: str, value: Any) -> Any:
    """Return what is left, with what the step computes in place of real tensors."""

    def result(tensor: torch.Tensor) -> torch.Tensor:
        if private.is_traced(tensor):
            return tensor
        same = tensor.detach()  # what stands for a known one is put in its place
        if not private.is_traced(same):
            raise CaptureError(
                f"{name}.{attribute} carries a tensor from call to call that is no input of the "
                "step yet",
                cause="outside",
            )
        return same

    return private.pytree.tree_map_only(torch.Tensor, result, value)
