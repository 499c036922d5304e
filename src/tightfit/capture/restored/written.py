"""Objects, containers and globals that a forward may write; attributes of modules aside."""

from __future__ import annotations

import collections
import dis
import functools
import threading
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from tightfit.capture.calls.structure import PLAIN
from tightfit.capture.libraries import is_library, is_ours

_MOST_OBJECTS = 20_000
_LARGEST_ARRAY = 1 << 20
_CONTAINERS = (list, dict, set, collections.deque)
_OPAQUE = (torch.Tensor, torch.Generator, nn.Module, threading.Thread, *PLAIN)
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS"})
_MISSING = object()


class Written:
    """Contents of objects around a forward; names changed objects, and restores them.

    `modules`: by name; other objects in the place of their attributes are noticed elsewhere.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._entries: list[tuple[str, Any, dict[str, Any]]] = []
        self._contents: list[tuple[str, Any, Any]] = []
        self._arrays: list[tuple[str, Any, Any]] = []
        self._visited: set[int] = set()
        self._alive: list[Any] = []
        self._waiting: collections.deque[tuple[Any, str]] = collections.deque()
        for name, module in modules.items():
            for key, value in module.__dict__.items():
                if not key.startswith("__tightfit"):
                    self._waiting.append((value, f"{name or 'model'}.{key}"))
            self._waiting.append((type(module), ""))
        most = _MOST_OBJECTS + len(self._waiting)  # attributes of modules are looked at first
        while self._waiting and len(self._visited) < most:
            value, path = self._waiting.popleft()
            if not isinstance(value, _OPAQUE) and id(value) not in self._visited:
                self._visited.add(id(value))
                self._alive.append(value)
                self._visit(value, path)

    def put_back(self) -> list[str]:
        """Return the names of changed objects; all are as before then."""
        changed: list[str] = []
        for path, holder, before in self._entries:
            names = [n for n, old in before.items() if not _same(_get(holder, n), old)]
            changed += [f"{path}{name}" for name in names]
            for name in names:
                _set(holder, name, before[name])
        for path, holder, before in self._contents:
            if not _holds(holder, before):
                changed.append(_changed_in(path, holder, before))
                holder.clear()
                getattr(holder, "extend" if isinstance(before, list) else "update")(before)
        for path, array, before in self._arrays:
            if array.tobytes() != before.tobytes():
                changed.append(path)
                array[...] = before
        return changed

    # -- looking ------------------------------------------------------------------------------

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, path)
        elif isinstance(value, types.MethodType):
            self._waiting += [(value.__func__, path), (value.__self__, path)]
        elif isinstance(value, property):
            self._waiting.append((value.fget, path))
        elif isinstance(value, staticmethod | classmethod):
            self._waiting.append((value.__func__, path))
        elif isinstance(value, numpy.ndarray):
            if value.nbytes <= _LARGEST_ARRAY and value.flags.writeable:
                self._arrays.append((path, value, value.copy()))
        elif isinstance(value, tuple):
            self._waiting.extend((item, f"{path}[{i}]") for i, item in enumerate(value))
        elif isinstance(value, _CONTAINERS):
            self._visit_container(value, path)
        elif not is_ours(type(value).__module__) or type(value).__module__ in ("types", "argparse"):
            self._visit_object(value, path)

    def _visit_container(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            held = dict(dict.items(value))  # a class may override `items`
            self._contents.append((path, value, held))
            self._waiting.extend((item, f"{path}[{key!r}]") for key, item in held.items())
        else:
            kept = set(value) if isinstance(value, set) else list(value)
            self._contents.append((path, value, kept))
            self._waiting.extend((item, f"{path}[{i}]") for i, item in enumerate(value))

    def _visit_object(self, value: Any, path: str) -> None:
        held = getattr(value, "__dict__", None)
        if type(held) is dict and not isinstance(value, types.ModuleType):
            self._contents.append((f"{path}.", held, dict(held)))
            self._waiting.extend((item, f"{path}.{name}") for name, item in held.items())
            self._waiting.append((type(value), ""))

    def _visit_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if is_ours(base.__module__) or id(base.__dict__) in self._visited:
                continue
            held = {k: v for k, v in vars(base).items() if not k.startswith("__")}
            data = {k: v for k, v in held.items() if isinstance(v, (*_CONTAINERS, *PLAIN))}
            self._entries.append((f"{base.__qualname__}.", base, data))
            self._waiting.extend((v, f"{base.__qualname__}.{k}") for k, v in held.items())

    def _visit_function(self, function: types.FunctionType, path: str) -> None:
        held = function.__globals__
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            before = _get(cell, "cell_contents")
            self._entries.append((f"{name} of ", cell, {"cell_contents": before}))
            self._waiting.append((before, name))
        self._waiting.extend((v, path) for v in function.__defaults__ or ())
        if is_library(held.get("__file__")) and held.get("__name__") != "__main__":
            return
        names = _loaded(function.__code__) & held.keys()
        module = held.get("__name__", "")
        self._entries.append((f"{module}.", held, {name: held[name] for name in names}))
        self._waiting.extend((held[name], f"{module}.{name}") for name in names)


@functools.lru_cache(maxsize=1 << 12)
def _loaded(code: types.CodeType) -> frozenset[str]:
    """Return the globals that code and functions defined in it load."""
    inner = (_loaded(c) for c in code.co_consts if isinstance(c, types.CodeType))
    own = (str(i.argval) for i in dis.get_instructions(code) if i.opname in _LOADS)
    return frozenset(own).union(*inner)


def _same(now: Any, before: Any) -> bool:
    """Whether two objects are the same object, or equal plain data."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(before, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    return isinstance(before, PLAIN) and (now == before or (now != now and before != before))


def _changed_in(path: str, holder: Any, before: Any) -> str:
    """Return the name of a changed attribute or entry of a container."""
    if not path.endswith("."):
        return path
    names = {*holder, *before}
    changed = (n for n in names if not _same(_get(holder, n), _get(before, n)))
    return path + min(changed, default="")


def _get(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):
        return dict.get(holder, name, _MISSING)  # a class may have another `get`, as transformers'
    if isinstance(holder, type):
        return vars(holder).get(name, _MISSING)
    try:
        return getattr(holder, name, _MISSING)
    except ValueError:  # a cell that nothing was put into
        return _MISSING


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    elif value is not _MISSING:
        setattr(holder, name, value)


def _holds(holder: Any, before: Any) -> bool:
    if len(holder) != len(before):
        return False
    if isinstance(before, set):
        return holder == before
    if isinstance(before, dict):
        pairs: Iterable[Any] = ((_get(holder, key), old) for key, old in before.items())
    else:
        pairs = zip(holder, before, strict=True)
    return all(now is old or _same(now, old) for now, old in pairs)
