"""Notice and undo side effects of a module's Python code that runs only to be measured."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn

from tightfit.capture.origins import module_names
from tightfit.capture.restored.written import Written

_BOOKKEEPING = frozenset({"_parameters", "_buffers", "_modules", "forward"})
_MISSING = object()


class PythonState:
    """A snapshot of everything Python code may change: module attributes and generators.

    Used as a context manager around a run: on exit everything is put back.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = module_names({"": module})
        self._changed: list[str] = []

    def __enter__(self) -> PythonState:
        self._attributes = {name: dict(module.__dict__) for name, module in self._modules.items()}
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
        self._numpy: Any = numpy.random.get_state(legacy=False)
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
            numpy.random.set_state(self._numpy)
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
        for key, value in before.items():
            if key not in _BOOKKEEPING and module.__dict__.get(key, _MISSING) is not value:
                self._changed.append(f"{_of(name)}.{key}")
                module.__dict__[key] = value

    @property
    def changed(self) -> list[str]:
        """Names of objects that had changed when the run ended."""
        return list(self._changed)


def _of(name: str) -> str:
    return name or "model"


def _same_numpy(before: Any) -> bool:
    now = numpy.random.get_state(legacy=False)
    if now["bit_generator"] != before["bit_generator"]:
        return False
    state, old = now["state"], before["state"]
    return state["pos"] == old["pos"] and bool(numpy.array_equal(state["key"], old["key"]))
