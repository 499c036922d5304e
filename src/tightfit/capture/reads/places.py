"""Places that hold what a forward read, and the check that the same is there now.

Each kind of place remembers one holder (the dict of an object, a list, an array, ...) and what it
held. Identity is compared first, in one pass of C; only where it differs are plain contents
compared.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

import torch

from tightfit.capture.calls.structure import PLAIN

__all__ = [
    "MISSING",
    "Asked",
    "Buffer",
    "Entries",
    "Flat",
    "Items",
    "Members",
    "Place",
    "Seen",
    "TensorPlace",
    "content_of",
    "flattened",
    "same",
    "shown",
]

_LONGEST = 60


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
"""Stands for what is not there."""


def content_of(cell: Any) -> Any:
    """Return what a cell of a closure holds; `MISSING` where nothing was put into it."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


class Place(Protocol):
    """Something that was read."""

    def holds(self) -> bool:
        """Whether the same is there now."""
        ...

    def change(self) -> str:
        """Say what is there instead; only if it does not hold."""
        ...

    def held(self) -> tuple[Any, ...]:
        """Return what was there."""
        ...


def same(now: Any, before: Any) -> bool:
    """Whether two objects are one, or equal plain data."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(before, tuple):
        return len(now) == len(before) and all(map(same, now, before))
    return isinstance(before, PLAIN) and (now == before or (now != now and before != before))


class Entries:
    """Some entries of a dict: attributes of an object or of a class, globals.

    Parameters
    ----------
    path : str
        What is in front of their names.
    holder : mapping
        The dict.
    names : sequence of str
        Their keys.
    """

    def __init__(self, path: str, holder: Mapping[str, Any], names: Sequence[str]) -> None:
        self._path = path
        self.holder = holder
        self.names = tuple(names)
        self.before = tuple(holder.get(name, MISSING) for name in self.names)

    def holds(self) -> bool:
        """Whether the same is there now."""
        return not any(True for _ in self._changes())

    def held(self) -> tuple[Any, ...]:
        """Return what was there."""
        return self._path, self.names, self.before

    def change(self) -> str:
        """Say what is there instead."""
        name, before, now = next(self._changes())
        return _difference(f"{self._path}{name}", before, now)

    def _changes(self) -> Iterator[tuple[str, Any, Any]]:
        for name, before in zip(self.names, self.before, strict=True):
            now = self.holder.get(name, MISSING)
            if not same(now, before):
                yield name, before, now


class Flat:
    """Entries of many dicts, compared by identity in one pass of C.

    Parameters
    ----------
    kind : type
        The class of the dicts.
    entries : sequence of Entries
        Those of such dicts.
    """

    def __init__(self, kind: Any, entries: Sequence[Entries]) -> None:
        self._get = kind.get
        self._entries = tuple(entries)
        self._holders = tuple(each.holder for each in entries for _ in each.names)
        self._names = tuple(name for each in entries for name in each.names)
        self._before = tuple(value for each in entries for value in each.before)

    def holds(self) -> bool:
        """Whether the same is there now."""
        now = map(self._get, self._holders, self._names, repeat(MISSING))
        if all(map(operator.is_, now, self._before)):
            return True
        return all(each.holds() for each in self._entries)

    def held(self) -> tuple[Any, ...]:
        """Return what was there."""
        return tuple(each.held() for each in self._entries)

    def change(self) -> str:
        """Say what is there instead."""
        return next(each.change() for each in self._entries if not each.holds())


def flattened(places: Sequence[Place]) -> tuple[Place, ...]:
    """Return the same places, with all that lies in dicts compared at once."""
    rest = list(places)
    flat: list[Place] = []
    for kind in (dict, types.MappingProxyType):
        chosen = [p for p in rest if isinstance(p, Entries) and isinstance(p.holder, kind)]
        if chosen:
            flat.append(Flat(kind, chosen))
        rest = [p for p in rest if not (isinstance(p, Entries) and isinstance(p.holder, kind))]
    return (*flat, *rest)


class Items:
    """The items of a list, a deque or another sequence that changes."""

    def __init__(self, path: str, holder: Any, skipped: frozenset[int] = frozenset()) -> None:
        self._path = path
        self._holder = holder
        self._skipped = skipped
        self._before = tuple(MISSING if i in skipped else x for i, x in enumerate(holder))

    def holds(self) -> bool:
        """Whether the same is there now."""
        if len(self._holder) != len(self._before):
            return False
        return all(map(operator.is_, self._holder, self._before)) or self._place() is None

    def held(self) -> tuple[Any, ...]:
        """Return what was there."""
        return self._path, self._before

    def change(self) -> str:
        """Say what is there instead."""
        if len(self._holder) != len(self._before):
            return f"{self._path} has {len(self._holder)} items, not {len(self._before)}"
        place = self._place()
        assert place is not None
        before, now = self._before[place], self._holder[place]
        return _difference(f"{self._path}[{place}]", before, now)

    def _place(self) -> int | None:
        for place, (now, before) in enumerate(zip(self._holder, self._before, strict=True)):
            if place not in self._skipped and not same(now, before):
                return place
        return None


class Members:
    """All that a dict or a set holds, in its order."""

    def __init__(self, path: str, holder: Any, skipped: frozenset[Any] = frozenset()) -> None:
        self._path = path
        self._holder = holder
        self._skipped = skipped
        self._is_dict = hasattr(holder, "items")
        held = list(holder.items()) if self._is_dict else ()  # at once: threads may add to it
        self._keys = tuple(key for key, _ in held) if self._is_dict else tuple(holder)
        self._values = tuple(MISSING if key in skipped else value for key, value in held)

    def holds(self) -> bool:
        """Whether the same is there now."""
        if len(self._holder) != len(self._keys):
            return False
        same = all(map(operator.is_, self._holder, self._keys))
        if same and self._is_dict:
            same = all(map(operator.is_, self._holder.values(), self._values))
        return same or self._place() is None

    def held(self) -> tuple[Any, ...]:
        """Return what was there."""
        keys = self._keys if self._is_dict else frozenset(self._keys)
        return self._path, keys, self._values

    def change(self) -> str:
        """Say what is there instead."""
        place = self._place() if len(self._holder) == len(self._keys) else None
        if place is None or not self._is_dict:
            return f"what is in {self._path} changed"
        before, now = self._values[place], list(self._holder.values())[place]
        return _difference(f"{self._path}[{self._keys[place]!r}]", before, now)

    def _place(self) -> int | None:
        values = tuple(self._holder.values()) if self._is_dict else ()
        for place, (now, before) in enumerate(zip(self._holder, self._keys, strict=True)):
            if not same(now, before) and (self._is_dict or before not in self._holder):
                return place
            compared = self._is_dict and before not in self._skipped
            if compared and not same(values[place], self._values[place]):
                return place
        return None


class Asked:
    """What an object tells when it is asked: a slot, a context variable."""

    def __init__(self, path: str, ask: Callable[[], Any]) -> None:
        self._path = path
        self._ask = ask
        self._before = ask()

    def holds(self) -> bool:
        """Whether the same is there now."""
        return same(self._ask(), self._before)

    def held(self) -> tuple[Any, ...]:
        """Return what was there."""
        return self._path, self._before

    def change(self) -> str:
        """Say what is there instead."""
        return f"{self._path} changed from {shown(self._before)} to {shown(self._ask())}"


class Buffer:
    """The bytes of an array."""

    def __init__(self, path: str, array: Any) -> None:
        self._path = path
        self._array = array
        self._before = self._now()

    def _now(self) -> tuple[Any, ...]:
        array = self._array
        layout = (array.dtype.str, array.shape) if hasattr(array, "dtype") else ()
        return (*layout, array.tobytes() if hasattr(array, "tobytes") else bytes(array))

    def holds(self) -> bool:
        """Whether the same is there now."""
        return self._now() == self._before

    def held(self) -> tuple[Any, ...]:
        """Return what was there."""
        return self._path, self._before

    def change(self) -> str:
        """Say what is there instead."""
        return f"what is in {self._path} changed"


class Seen:
    """A tensor that was met on the way and is no input of the plan: itself, as it was."""

    def __init__(self, path: str, tensor: torch.Tensor, fetch: Callable[[], Any]) -> None:
        self._path = path
        self._fetch = fetch
        self._tensor = weakref.ref(tensor)
        self._version = tensor._version

    def holds(self) -> bool:
        """Whether it is there, and nobody has written into it."""
        tensor = self._fetch()
        return tensor is self._tensor() and tensor._version == self._version

    def held(self) -> tuple[Any, ...]:
        """Return what was there."""
        return self._path, self._tensor()

    def change(self) -> str:
        """Say what is there instead."""
        return f"the tensor in {self._path} changed"


class TensorPlace:
    """Where a tensor lies that is an input of the plan: any tensor like it may lie there.

    Parameters
    ----------
    path : str
        Its name.
    fetch : callable
        Returns what lies there now.
    """

    def __init__(self, path: str, fetch: Callable[[], Any]) -> None:
        self.path = path
        self.fetch = fetch
        self._before = _kind(fetch())

    def holds(self) -> bool:
        """Whether a tensor like that is there now."""
        return _kind(self.fetch()) == self._before

    def held(self) -> tuple[Any, ...]:
        """Return what was there."""
        return self.path, self._before

    def change(self) -> str:
        """Say what is there instead."""
        return f"{self.path} is {shown(self.fetch())} now"


def _kind(tensor: Any) -> Any:
    if type(tensor) is not torch.Tensor:
        return tensor
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.layout,
    )


def _difference(path: str, before: Any, now: Any) -> str:
    """Say how two objects in one place differ: by a field, if they are of one class."""
    old, new = (getattr(x, "__dict__", None) for x in (before, now))
    if type(before) is type(now) and isinstance(old, dict) and isinstance(new, dict):
        for name in old:
            if not isinstance(old[name], torch.Tensor) and not same(new.get(name), old[name]):
                before, now, path = old[name], new.get(name), f"{path}.{name}"
                break
    return f"{path} changed from {shown(before)} to {shown(now)}"


def shown(value: Any) -> str:
    """Return a value in a message: short, tensors by their shape."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (type(None), _Missing, *PLAIN)):
        text = repr(value)
        return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return value.__qualname__
    return f"a {type(value).__name__}"
