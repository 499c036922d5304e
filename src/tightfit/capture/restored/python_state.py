"""Notice and undo side effects of a module's Python code that runs only to be measured."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tightfit.capture.origins import module_names
from tightfit.capture.restored.written import Written

_BOOKKEEPING = frozenset({"_parameters", "_buffers", "_modules", "forward"})
_CONTAINERS = (list, dict, set, collections.deque)


class PythonState:
    """A snapshot of everything Python code may change: module attributes and generators.

    Used as a context manager around a run: on exit everything is put back.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = module_names(modules)
        self._changed: list[str] = []

    def __enter__(self) -> PythonState:
        self._attributes = {
            name: {k: (v, _copied(v)) for k, v in module.__dict__.items()}
            for name, module in self._modules.items()
        }
        self._members = {
            name: (dict(m._parameters), dict(m._buffers), dict(m._modules))
            for name, m in self._modules.items()
        }
        self._generators = {
            f"{_of(name)}.{key}": (value, value.get_state())
            for name, module in self._modules.items()
            for key, value in module.__dict__.items()
            if isinstance(value, torch.Generator)
        }
        self._written = Written(self._modules)
        self._random = random.getstate()
        self._numpy = _numpy_state()
        self._torch = torch.get_rng_state()
        return self

    def __exit__(self, *_: Any) -> None:
        for name, module in self._modules.items():
            self._restore_members(name, module)
            self._restore_attributes(name, module)
        self._changed += self._written.put_back()
        for name, (generator, before) in self._generators.items():
            if not torch.equal(generator.get_state(), before):
                self._changed.append(name)
                generator.set_state(before)
        if random.getstate() != self._random:
            self._changed.append("the generator of Python's random module")
            random.setstate(self._random)
        if not _same_numpy(self._numpy):
            self._changed.append("numpy's global random generator")
            _set_numpy_state(self._numpy)
        torch.set_rng_state(self._torch)

    def _restore_members(self, name: str, module: nn.Module) -> None:
        kept = (module._parameters, module._buffers, module._modules)
        for current, before in zip(kept, self._members[name], strict=True):
            if current.keys() != before.keys() or any(current[k] is not before[k] for k in before):
                changed = [k for k in {*current, *before} if current.get(k) is not before.get(k)]
                self._changed.extend(f"{_of(name)}.{k}" for k in changed[:1])
                current.clear()
                current.update(before)

    def _restore_attributes(self, name: str, module: nn.Module) -> None:
        before = self._attributes[name]
        for key in [k for k in module.__dict__ if k not in before]:
            self._changed.append(f"{_of(name)}.{key}")
            del module.__dict__[key]
        for key, (value, snapshot) in before.items():
            if key in _BOOKKEEPING:
                continue
            if not _is_as_before(module.__dict__.get(key, _MISSING), value, snapshot):
                self._changed.append(f"{_of(name)}.{key}")
                if snapshot is not None and isinstance(value, _CONTAINERS):
                    _refill(value, snapshot)
                module.__dict__[key] = value

    @property
    def changed(self) -> list[str]:
        """Names of objects that had changed when the run ended."""
        return list(self._changed)


_MISSING = object()


def _of(name: str) -> str:
    return name or "model"


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, _CONTAINERS) else None


def _is_as_before(current: Any, value: Any, snapshot: Any) -> bool:
    """Whether an attribute is the same object, and holds the same if it is a container."""
    return current is value and (snapshot is None or _equal(current, snapshot))


def _equal(current: Any, snapshot: Any) -> bool:
    """Whether a container holds the same objects as its snapshot."""
    if type(current) is not type(snapshot) or len(current) != len(snapshot):
        return False
    if isinstance(snapshot, dict):
        return current.keys() == snapshot.keys() and all(
            _same(current[k], snapshot[k]) for k in snapshot
        )
    if isinstance(snapshot, set):
        return current == snapshot
    return all(_same(a, b) for a, b in zip(current, snapshot, strict=True))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    if type(a) is type(b) and isinstance(a, int | float | str | bytes | tuple):
        return a == b
    return False


def _refill(container: Any, snapshot: Any) -> None:
    if isinstance(container, list | collections.deque):
        container.clear()
        container.extend(snapshot)
    else:
        container.clear()
        container.update(snapshot)


def _numpy_state() -> Any:
    import numpy

    return numpy.random.get_state(legacy=False)


def _same_numpy(before: Any) -> bool:
    import numpy

    now = _numpy_state()
    if now["bit_generator"] != before["bit_generator"]:
        return False
    state, old = now["state"], before["state"]
    return state["pos"] == old["pos"] and bool(numpy.array_equal(state["key"], old["key"]))


def _set_numpy_state(state: Any) -> None:
    import numpy

    numpy.random.set_state(state)
