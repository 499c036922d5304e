"""The signature of modules, made anew only where something about them has changed.

What a signature says of modules lies in their dicts and in their tensors. All of it is compared
with how it was, in a few passes that run in C: about half a microsecond for a module.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.signature import APART, HOOKS, modes, module_signature
from tightfit.torch_private import core as private

__all__ = ["KnownSignature", "WatchedModules"]

_MEMBERS = ("_modules", "_parameters", "_buffers")
_MISSING = object()


class KnownSignature:
    """A signature whose hash is computed once.

    Parameters
    ----------
    parts : tuple
        What it says.
    """

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, KnownSignature) or self._hash != other._hash:
            return False
        return self.parts == other.parts


class WatchedModules:
    """Tells the signature of calls that use the same modules.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        The modules a step uses.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._state: _State | None = None
        self._of: tuple[Any, ...] = ()
        self._known: KnownSignature | None = None

    def signature(
        self, leaves: Sequence[Any], root: nn.Module | None, kept: frozenset[tuple[str, str]]
    ) -> KnownSignature:
        """Return what a step depends on of its modules; see `module_signature`."""
        given = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        around = (modes(), private.global_settings(), len(given), id(root), kept)
        state = self._state
        if self._known is None or around != self._of or state is None or not state.holds(given):
            self._known = KnownSignature(module_signature(self._modules, root, kept, leaves))
            self._of = around
            self._state = _State.of(self._modules, root, kept)
        return self._known


class _State:
    """All that the signature of some modules is made of, as it was."""

    def __init__(
        self, modules: Sequence[tuple[str, nn.Module]], root: nn.Module | None, kept: Any
    ) -> None:
        self._own = [module for _, module in modules]
        self._kinds = [type(module) for module in self._own]
        self._watch_members(self._own, root)
        self._watch_attributes(modules, kept)
        self._members_set = frozenset(self._members)

    @classmethod
    def of(
        cls, modules: Mapping[str, nn.Module], root: nn.Module | None, kept: Any
    ) -> _State | None:
        """Return the state of modules; None if it cannot be compared in little time."""
        found: dict[nn.Module, str] = {}
        for prefix, top in modules.items():
            for name, module in top.named_modules():
                found.setdefault(module, f"{prefix}.{name}".rstrip("."))
        try:
            return cls([(name, module) for module, name in found.items()], root, kept)
        except (TypeError, ValueError, RuntimeError):
            return None

    def _watch_members(self, modules: Iterable[nn.Module], root: nn.Module | None) -> None:
        """Note the dicts of members and hooks: those that are empty, and what others hold."""
        dicts = [m.__dict__[name] for m in modules for name in _MEMBERS]
        dicts += [getattr(m, hooks) for m in modules if m is not root for hooks in HOOKS]
        self._empty = [held for held in dicts if not held]
        self._dicts = [held for held in dicts if held]
        self._keys = list(chain.from_iterable(self._dicts))
        members = self._held()
        self._members = list(map(id, members))
        self._lengths = list(map(len, self._dicts))
        known: set[int] = set()
        self._is_tensor = [
            _is_tensor(x) and id(x) not in known and not known.add(id(x)) for x in members
        ]
        self._geometry = private.tensor_guards(list(compress(members, self._is_tensor)))

    def _held(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))

    def _watch_attributes(self, modules: Sequence[tuple[str, nn.Module]], kept: Any) -> None:
        """Note all attributes but those that every forward changes, and what containers hold.

        Tensors are not held: whoever replaces one wants its memory back.
        """
        places = [(m.__dict__, key, (n, key) in kept) for n, m in modules for key in m.__dict__]
        odd = {id(d) for d, key, changes in places if changes or isinstance(d[key], torch.Tensor)}
        entries = [(d, key) for d, key, changes in places if id(d) in odd and not changes]
        self._seen = [(d, k, weakref.ref(d[k])) for d, k in entries if _is_tensor(d[k])]
        entries = [(d, k) for d, k in entries if not _is_tensor(d[k])]
        values = [d[key] for d, key in entries]
        self._entries = [d for d, _ in entries], [key for _, key in entries], values
        whole = [m.__dict__ for _, m in modules if id(m.__dict__) not in odd]
        values = chain(chain.from_iterable(d.values() for d in whole), values)
        known = {id(d[k]) for d, k, _ in places if k in APART}  # compared above, or of no account
        self._equal = [*whole, *_containers(values, known)]
        self._before = [type(held)(held) for held in self._equal]

    def holds(self, given: set[int]) -> bool:
        """Whether nothing has changed; arguments that are members themselves count as a change."""
        if any(self._empty) or not given.isdisjoint(self._members_set):
            return False
        members = self._held()
        try:
            return (
                list(map(id, members)) == self._members
                and list(map(len, self._dicts)) == self._lengths
                and list(chain.from_iterable(self._dicts)) == self._keys
                and all(map(operator.is_, map(type, self._own), self._kinds))
                and all(map(operator.eq, self._equal, self._before))
                and self._has_entries()
                and all(held.get(key) is tensor() for held, key, tensor in self._seen)
                and self._geometry(*compress(members, self._is_tensor))
            )
        except (TypeError, ValueError, RuntimeError):  # of user classes that compare in their way
            return False

    def _has_entries(self) -> bool:
        dicts, keys, values = self._entries
        return all(map(operator.is_, map(dict.get, dicts, keys, repeat(_MISSING)), values))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _containers(values: Iterable[Any], known: set[int]) -> list[Any]:
    """Return the containers among some values, and in them, that can be changed."""
    found: list[Any] = []
    waiting = [v for v in values if type(v) in (list, dict, set, tuple)]
    while waiting:
        value = waiting.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        items = value.values() if isinstance(value, dict) else value
        if type(value) is not tuple and not any(map(_is_tensor, items)):
            found.append(value)
        waiting.extend(v for v in items if type(v) in (list, dict, set, tuple))
    return found
