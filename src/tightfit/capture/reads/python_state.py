"""Detect and undo what a model's Python code changes while it is captured.

A captured step replays operators, not Python. Code that counts calls, draws from `random` or
collects tensors in lists would run once, at capture, and never again: such a model is refused by
name, and what capture changed is put back.
"""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tightfit.capture.origins import module_names
from tightfit.capture.reads.written import Written
from tightfit.errors import CaptureError, first_of
from tightfit.torch_private.core import FakeTensor, is_traced

__all__ = ["PythonState"]

_BOOKKEEPING = frozenset({"_parameters", "_buffers", "_modules", "forward"})
_CONTAINERS = (list, dict, set, collections.deque)
_MOST_NAMED = 8


class PythonState:
    """A snapshot of everything Python code may change: module attributes and generators.

    Used as a context manager around a trace: on exit everything is put back. `raise_if_changed`
    afterwards refuses the model if something had changed.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        The modules.
    keeps : bool
        Put back generators of PyTorch only, and let modules keep what changed.

    Attributes
    ----------
    drew : bool
        Whether numbers were drawn that a plan does not draw: by Python, numpy, or a module's own
        generator.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._modules = module_names(modules)
        self._changed: list[str] = []
        self.drew = False

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
        self._written = Written(self._modules) if not self._keeps else Written({})
        self._random = random.getstate()
        self._numpy = _numpy_state()
        self._torch = torch.get_rng_state()
        return self

    def __exit__(self, *_: Any) -> None:
        for name, module in () if self._keeps else self._modules.items():
            self._restore_members(name, module)
            self._restore_attributes(name, module)
        self._changed += self._written.put_back()
        before_drawing = len(self._changed)
        for name, (generator, before) in self._generators.items():
            if not torch.equal(generator.get_state(), before):
                self._changed.append(name)
                generator.set_state(before)
        if random.getstate() != self._random:
            self._changed.append("the generator of Python's random module")
            if not self._keeps:  # else what is drawn once is drawn for good
                random.setstate(self._random)
        if not _same_numpy(self._numpy):
            self._changed.append("numpy's global random generator")
            if not self._keeps:
                _set_numpy_state(self._numpy)
        self.drew = len(self._changed) > before_drawing
        torch.set_rng_state(self._torch)

    def _restore_members(self, name: str, module: nn.Module) -> None:
        kept = (module._parameters, module._buffers, module._modules)
        for current, before in zip(kept, self._members[name], strict=True):
            if current.keys() != before.keys() or any(current[k] is not before[k] for k in before):
                changed = [k for k in {*current, *before} if current.get(k) is not before.get(k)]
                own = [k for k in changed if not (k in before and _is_left_by_tracer(current, k))]
                self._changed.extend(f"{_of(name)}.{k}" for k in own[:1])
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
        """What had changed when the trace ended."""
        return list(self._changed)

    @property
    def has_changed(self) -> bool:
        """Whether attributes or objects around the modules are others by now.

        Asked while a trace goes on, in which no operator may run for its own sake, and other code
        draws by Python: generators are looked at when it has ended.
        """
        attributes = any(
            any(k not in before and k not in _BOOKKEEPING for k in self._modules[name].__dict__)
            or any(
                not _is_as_before(self._modules[name].__dict__.get(k, _MISSING), *held)
                for k, held in before.items()
                if k not in _BOOKKEEPING
            )
            for name, before in self._attributes.items()
        )
        return attributes or self._written.has_changed

    def _set_by_hook(self, change: str) -> bool:
        """Whether what changed is a tensor that a hook gives its module anew on every forward.

        So do `torch.nn.utils.weight_norm`, `spectral_norm` and `prune`.
        """
        owner, _, key = change.rpartition(".")
        module = self._modules.get("" if owner == "model" else owner)
        return (
            module is not None
            and bool(module._forward_pre_hooks)
            and isinstance(getattr(module, key, None), torch.Tensor)
        )

    def raise_if_changed(self) -> None:
        """Refuse a model whose Python state changed during the trace.

        Raises
        ------
        CaptureError
            Names what changed.
        """
        if self._changed:
            changed = list(dict.fromkeys(self._changed))
            what = first_of(changed, _MOST_NAMED)
            if all(map(self._set_by_hook, changed)):
                raise CaptureError(
                    f"hooks set {what} anew on every forward (an old norm, or pruning), which is "
                    "planned only where the whole step is. Way out: the same as a parametrization "
                    "(torch.nn.utils.parametrizations, parametrize.register_parametrization with "
                    "the mask), or what it made for good (prune.remove). The model is unchanged",
                    cause="hook",
                )
            raise CaptureError(
                f"the forward pass changes Python state: {what}. A planned step replays operators,"
                " not Python, so this would silently stop happening. Way out: make it a registered"
                " buffer (tensors), do it outside the fitted module, or draw random numbers with "
                "torch. The model is unchanged",
                cause="state",
            )


_MISSING = object()


def _is_left_by_tracer(members: dict[str, Any], key: str) -> bool:
    """Whether the tracer did not put a parameter or buffer back.

    It does not where one module has several names. What a forward itself replaces is refused
    while it is traced.
    """
    value = members.get(key)
    return isinstance(value, torch.Tensor) and is_traced(value)


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
    if isinstance(a, torch.Tensor | FakeTensor) or isinstance(b, torch.Tensor):
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
