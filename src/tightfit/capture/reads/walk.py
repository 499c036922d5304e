"""From what code has run to all it can have read: through objects, by the names it loads."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import dataclasses
import enum
import functools
import inspect
import itertools
import operator
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from tightfit.capture.calls.modules import HOOKS
from tightfit.capture.calls.structure import PLAIN
from tightfit.capture.reads.executed import Executed, is_library, is_ours
from tightfit.capture.reads.names import Names
from tightfit.capture.reads.places import (
    MISSING,
    Asked,
    Buffer,
    Entries,
    Items,
    Members,
    Place,
    Seen,
    TensorPlace,
    content_of,
)
from tightfit.capture.reads.written import TRACERS
from tightfit.errors import CaptureError

__all__ = ["Walk"]

_BOOKKEEPING = frozenset(nn.Module().__dict__) | {"forward"}
_SEQUENCES = (list, collections.deque)
_SETS = (set, frozenset)
_DATA = (argparse.Namespace, types.SimpleNamespace)
_LARGEST_ARRAY = 1 << 20  # compared in a tenth of a millisecond
_DRAWING = (random.Random, numpy.random.Generator, numpy.random.RandomState)
_ADVANCING = (
    itertools.count,
    itertools.cycle,
    types.GeneratorType,
    type(iter([])),
    type(iter(())),
    type(iter({})),
    type(iter(range(0))),
    map,
    filter,
    zip,
    enumerate,
)
_ASKERS = (operator.attrgetter, operator.methodcaller)
_ASKING = (getattr, vars, object.__getattribute__, inspect.getattr_static)
_HEAP_TYPE = 1 << 9


class Walk:
    """Goes through what code can have read, and notes every place.

    Parameters
    ----------
    executed : Executed
        What ran.
    names : Names
        What that loads.
    modules : dict of str to nn.Module
        The modules of the call: their members and plain attributes are compared elsewhere.
    opaque : frozenset of nn.Module
        Those that run eagerly in every step.
    inputs : dict of int to int
        By id: the outside tensors that are inputs of the plan, and their numbers.
    unread : frozenset of (int, object)
        By id of the holder, and key: what is written before it is read.

    Attributes
    ----------
    places : list of Place
        What was found.
    fetched : dict of int to TensorPlace
        Where the outside tensors lie.
    asks : bool
        Whether it met what reads attributes whose names no code shows: an `attrgetter`, say.
    """

    def __init__(
        self,
        executed: Executed,
        names: Names,
        modules: Mapping[str, nn.Module],
        opaque: frozenset[nn.Module],
        inputs: Mapping[int, int],
        unread: frozenset[tuple[int, Any]],
    ) -> None:
        self.places: list[Place] = []
        self.fetched: dict[int, TensorPlace] = {}
        self.asks = False
        self._names = names
        self._codes = {code for code, _ in executed.codes}
        self._opaque = opaque
        self._own = {module for top in modules.values() for module in top.modules()}
        self._inputs = inputs
        self._unread = unread
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        self._alive: list[Any] = []
        self._waiting: collections.deque[tuple[Any, str]] = collections.deque()

    def through(self, roots: Iterable[tuple[Any, str]]) -> None:
        """Walk from some roots, each with its name."""
        self._waiting.extend(roots)
        while self._waiting:
            value, path = self._waiting.popleft()
            if not isinstance(value, PLAIN) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._alive.append(value)
                self._visit(value, path)

    def entries(self, path: str, holder: Mapping[str, Any], names: Iterable[str]) -> None:
        """Note some entries of a dict, and go on to what they hold."""
        chosen = sorted(name for name in names if (id(holder), name) not in self._unread)
        plain: list[str] = []
        for name in chosen:
            value = holder.get(name, MISSING)
            if not self._held(f"{path}{name}", value, functools.partial(holder.get, name)):
                plain.append(name)
                self._waiting.append((value, f"{path}{name}"))
        if plain:
            self.places.append(Entries(path, holder, plain))

    def globals(self, holder: Mapping[str, Any], names: frozenset[str]) -> None:
        """Note the globals that code of one module loads."""
        module = holder.get("__name__", "")
        self.entries(f"{module}." if module else "", holder, names & holder.keys())

    def _held(self, path: str, value: Any, fetch: Callable[[], Any]) -> bool:
        """Note a tensor in its place, and containers of inputs of the plan by what they hold.

        Returns
        -------
        bool
            Whether it was such; other objects are compared by identity where they lie.
        """
        if isinstance(value, torch.Tensor):
            self._tensor(path, value, fetch)
            return True
        if not isinstance(value, tuple | list | dict) or not self._has_inputs(value):
            return False
        self.places.append(Asked(path, functools.partial(_form, fetch)))
        items = list(value.items()) if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            inner, where = functools.partial(_within, fetch, key), f"{path}[{key!r}]"
            if not self._held(where, item, inner):
                self.places.append(Asked(where, inner))
                self._waiting.append((item, where))
        return True

    def _has_inputs(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return id(value) in self._inputs
        if not isinstance(value, tuple | list | dict):
            return False
        items = list(value.values()) if isinstance(value, dict) else value
        return any(map(self._has_inputs, items))

    # -- tensors ------------------------------------------------------------------------------

    def _tensor(self, path: str, tensor: torch.Tensor, fetch: Callable[[], Any]) -> None:
        number = self._inputs.get(id(tensor))
        if number is None:
            self.places.append(Seen(path, tensor, fetch))
            return
        place = TensorPlace(path, fetch)
        self.places.append(place)
        if number in self.fetched:
            self.places.append(Asked(path, functools.partial(_agree, self.fetched[number], place)))
        self.fetched.setdefault(number, place)

    # -- kinds of objects ---------------------------------------------------------------------

    def _visit(self, value: Any, path: str) -> None:
        _refuse_unseen(value, path)
        self.asks |= isinstance(value, _ASKERS) or any(value is asker for asker in _ASKING)
        if isinstance(value, nn.Module):
            self._visit_module(value, path)
        elif isinstance(value, types.ModuleType):
            if not is_library(getattr(value, "__file__", None)):
                self.entries(f"{path}.", vars(value), self._names.attributes & vars(value).keys())
        elif isinstance(value, type):
            self._visit_class(value)
        elif not self._visit_callable(value, path):
            self._visit_contents(value, path)
            self._visit_object(value, path)

    def _visit_module(self, module: nn.Module, path: str) -> None:
        if module in self._opaque:
            return
        held = module.__dict__
        names = (self._names.attributes & held.keys()) - {"training"}
        if module not in self._own:  # its members and what PyTorch's code reads are noted as well
            names = held.keys() - _BOOKKEEPING | {"training"}
            for members in (module._parameters, module._buffers, module._modules):
                self.entries(f"{path}.", members, members)
        self.entries(f"{path}.", held, names - _BOOKKEEPING | (names & {"training"}))
        for hooks in HOOKS:
            self._waiting.extend((hook, f"{path}.{hooks}") for hook in held[hooks].values())
        self._visit_class(type(module))

    def _visit_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if is_ours(base.__module__) or base in self._classes or issubclass(base, enum.Enum):
                continue
            self._classes.add(base)
            held = vars(base)
            names = {name for name in self._names.attributes & held.keys() if name[:2] != "__"}
            inherited = self._data_of(base.__mro__[1:]) - held.keys()
            self.entries(f"{base.__qualname__}.", held, names | inherited)

    def _data_of(self, classes: Iterable[type]) -> frozenset[str]:
        """Return the data that is read of classes, which what is before them could hide."""
        return frozenset(
            name
            for base in classes
            if not is_ours(base.__module__)
            for name in self._names.attributes & vars(base).keys()
            if not isinstance(vars(base)[name], types.FunctionType) and name[:2] != "__"
        )

    def _visit_callable(self, value: Any, path: str) -> bool:
        if isinstance(value, types.FunctionType):
            held = vars(value)
            self.entries(f"{path}.", held, self._names.attributes & held.keys())
            if value.__code__ in self._codes:
                self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._waiting += [(value.__func__, path), (value.__self__, path)]
        elif isinstance(value, functools.partial):
            self._waiting += [(value.func, path), (value.args, path), (value.keywords, path)]
        elif isinstance(value, property):
            self._waiting.append((value.fget, path))
        elif isinstance(value, functools.cached_property):
            self._waiting.append((value.func, path))
        elif isinstance(value, staticmethod | classmethod):
            self._waiting.append((value.__func__, path))
        elif isinstance(value, functools.partialmethod):
            self._waiting += [(value.func, path), (value.args, path), (value.keywords, path)]
        elif isinstance(value, weakref.ref):
            self._waiting.append((value(), path))
        elif isinstance(value, contextvars.ContextVar):
            self.places.append(Asked(path, functools.partial(value.get, MISSING)))
            self._waiting.append((value.get(MISSING), path))
        else:
            return False
        return True

    def _visit_function(self, function: types.FunctionType) -> None:
        name = function.__qualname__
        for variable, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            where = f"{variable} of {name}"
            fetch = functools.partial(content_of, cell)
            if not self._held(where, fetch(), fetch):
                self.places.append(Asked(where, fetch))
                self._waiting.append((fetch(), where))
        if function.__defaults__ or function.__kwdefaults__:
            fetch = functools.partial(_defaults, function)
            self.places.append(Asked(f"what is by default in {name}", fetch))
            self._waiting.append((fetch(), f"a default of {name}"))
        self._waiting.append((vars(function).get("__wrapped__"), name))

    def _visit_contents(self, value: Any, path: str) -> None:
        if isinstance(value, tuple | list | collections.deque):
            self._visit_items(value, path)
        elif isinstance(value, dict | types.MappingProxyType | weakref.WeakKeyDictionary):
            held = dict(value)  # as it is now: threads may add to it
            tensors = [key for key, item in held.items() if isinstance(item, torch.Tensor)]
            for key in tensors:
                fetch = functools.partial(value.get, key)
                if (id(value), key) not in self._unread:
                    self._tensor(f"{path}[{key!r}]", held[key], fetch)
            if TRACERS.isdisjoint(held):
                self.places.append(Members(path, value, frozenset(tensors)))
            else:  # kept by kind of tensor: another kind that is met later tells nothing new
                self.places.append(Asked(path, functools.partial(_but_kinds_of_tensors, value)))
            self._waiting.extend((item, f"{path}[{key!r}]") for key, item in held.items())
        elif isinstance(value, _SETS):
            self.places.append(Members(path, value))
            items = sorted(value, key=_known_by)  # in one order in every process
            self._waiting.extend((item, f"an item of {path}") for item in items)
        elif isinstance(value, numpy.ndarray):
            self._visit_array(value, path)
        elif isinstance(value, bytearray | array.array):
            self.places.append(Buffer(path, value))

    def _visit_items(self, value: Sequence[Any], path: str) -> None:
        tensors = {i for i, item in enumerate(value) if isinstance(item, torch.Tensor)}
        for i in tensors:
            if (id(value), i) not in self._unread:
                fetch = functools.partial(_item, value, i)
                self._tensor(f"{path}[{i}]", value[i], fetch)
        if not isinstance(value, tuple):
            self.places.append(Items(path, value, frozenset(tensors)))
        self._waiting.extend(
            (item, f"{path}[{i}]") for i, item in enumerate(value) if i not in tensors
        )

    def _visit_array(self, value: numpy.ndarray, path: str) -> None:
        if value.nbytes > _LARGEST_ARRAY and value.flags.writeable:
            raise CaptureError(
                f"the forward can read {path}, an array of {value.nbytes:,} bytes: to compare so "
                "many in every step takes too long, and with old ones the result would be wrong. "
                "Way out: self.register_buffer(name, torch.from_numpy(array)), or make it "
                f"read-only (array.flags.writeable = False); up to {_LARGEST_ARRAY:,} bytes are "
                "compared"
            )
        if value.dtype.hasobject:
            self._waiting.append((value.ravel().tolist(), path))
        elif value.nbytes <= _LARGEST_ARRAY:
            self.places.append(Buffer(path, value))

    def _visit_object(self, value: Any, path: str) -> None:
        """Note the attributes of an object that is more than its contents."""
        kind = type(value)
        if kind.__module__.startswith("tightfit."):  # what runs a forward in our name
            self._waiting.append((getattr(value, "_function", None), path))
            return
        is_data = isinstance(value, _DATA) or dataclasses.is_dataclass(value)
        is_local = isinstance(value, threading.local)
        if is_ours(kind.__module__) and not (is_data or is_local):
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            names = self._names.attributes & held.keys()
            if is_data and self._names.whole:
                names = frozenset(held)
            hidden = self._data_of(kind.__mro__)
            self.entries(f"{path}.", held, names | (hidden - held.keys()) | self._names.asked)
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name in self._names.attributes or (is_data and self._names.whole):
                    self._slot(value, name, f"{path}.{name}")
        self._visit_class(kind)

    def _slot(self, value: Any, name: str, path: str) -> None:
        fetch = functools.partial(getattr, value, name, MISSING)
        if not self._held(path, fetch(), fetch):
            self.places.append(Asked(path, fetch))
            self._waiting.append((fetch(), path))


def _refuse_unseen(value: Any, path: str) -> None:
    """Refuse objects whose state shows in no attribute."""
    if isinstance(value, _DRAWING) and value is not getattr(random, "_inst", None):
        raise CaptureError(
            f"the forward can draw from {path}, a {type(value).__name__}: a planned step would "
            "use the same numbers each time. Way out: draw with torch (a torch.Generator), "
            "pass what is drawn as an argument, or mark the module with tightfit.opaque"
        )
    if isinstance(value, _ADVANCING):
        raise CaptureError(
            f"the forward can take from {path}, a {type(value).__name__}: a planned step would "
            "use the same item each time. Way out: pass the item as an argument, or mark the "
            "module with tightfit.opaque"
        )
    kind = type(value)
    if (
        not kind.__flags__ & _HEAP_TYPE
        and not is_ours(kind.__module__)
        and not hasattr(value, "__dict__")
        and not callable(value)
    ):
        raise CaptureError(
            f"the forward can read {path}, a {kind.__module__}.{kind.__name__}: whether that "
            "has changed since cannot be seen from outside. Way out: keep what is needed of it "
            "in plain attributes, pass that as an argument, or mark the module with "
            "tightfit.opaque"
        )


def _but_kinds_of_tensors(held: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return what lies in a dict, but for what is kept there by the class of a tensor."""
    return tuple(
        (key, value)
        for key, value in dict(held).items()
        if not (isinstance(key, type) and issubclass(key, torch.Tensor))
    )


def _known_by(item: Any) -> tuple[str, str]:
    """Return what tells an item of a set from others, whatever its address is."""
    if isinstance(item, PLAIN):
        return type(item).__name__, repr(item)
    known = item if isinstance(item, type | types.FunctionType) else type(item)
    return known.__module__ or "", known.__qualname__


def _form(fetch: Callable[[], Any]) -> Any:
    value = fetch()
    return (type(value), *value) if isinstance(value, dict) else (type(value), _length(value))


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, tuple | list) else None


def _within(fetch: Callable[[], Any], key: Any) -> Any:
    try:
        return fetch()[key]
    except (TypeError, LookupError):
        return MISSING


def _defaults(function: types.FunctionType) -> Any:
    return function.__defaults__, function.__kwdefaults__


def _item(value: Sequence[Any], place: int) -> Any:
    return value[place] if place < len(value) else MISSING


def _agree(one: TensorPlace, other: TensorPlace) -> bool:
    return one.fetch() is other.fetch()


def imported(names: Iterable[tuple[str, str]]) -> list[tuple[dict[str, Any], frozenset[str]]]:
    """Return the globals of modules that are imported while code runs, and the names taken."""
    found = []
    for module, name in names:
        loaded = sys.modules.get(module)
        if name and loaded is not None and not is_library(getattr(loaded, "__file__", None)):
            found.append((vars(loaded), frozenset({name})))
    return found
