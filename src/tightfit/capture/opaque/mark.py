"""`tightfit.opaque`: modules that run as one op."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.capture.origins import module_names
from tightfit.errors import BadInput

_MARK = "_tightfit_opaque"
_AS_ONE_OP: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""Unmarked modules in which data decide sizes; with the callables that have found it."""


def opaque(module: nn.Module) -> nn.Module:
    """Let a module inside a fitted model run eagerly, as one measured op of the plan.

    For code that a graph cannot hold or a tracer cannot see into: kernels of other libraries,
    branches on data, own autograd code. Results stay those of eager, its time, workspace and the
    bytes it keeps for backward are measured, and the plan may still compute it again. Its output
    shapes must follow from its input shapes.

    Parameters
    ----------
    module : nn.Module
        Marked in place; `nn.RNN`, `nn.LSTM` and `nn.GRU` are opaque without it.

    Returns
    -------
    nn.Module
        The same module.

    Raises
    ------
    BadInput
        If it is no module.
    """
    if not isinstance(module, nn.Module):
        raise BadInput(
            f"opaque takes an nn.Module, got {type(module).__name__}: put the function into a "
            "module's forward"
        )
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        raise BadInput(f"the module is compiled ({type(module).__name__}): mark the plain one")
    module.__dict__[_MARK] = True
    return module


def is_opaque(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) or is_marked(module)


def is_marked(module: nn.Module) -> bool:
    """Whether a module is not to be looked into, as was marked or found out."""
    return bool(module.__dict__.get(_MARK, False)) or bool(_AS_ONE_OP.get(module))


def run_as_one_op(modules: Iterable[nn.Module], finder: object) -> None:
    """Look into modules no longer, as if they were marked, as long as the callable exists."""
    for module in modules:
        _AS_ONE_OP.setdefault(module, weakref.WeakSet()).add(finder)


def look_into(modules: Iterable[nn.Module], finder: object) -> None:
    """Look into modules again in which a callable had found that data decide sizes."""
    for module in modules:
        _AS_ONE_OP.get(module, weakref.WeakSet()).discard(finder)


def opaque_modules(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the outermost opaque modules by name: marked or recurrent."""
    found: dict[str, nn.Module] = {}
    for name, module in module_names(modules).items():
        inside = any(name.startswith(f"{outer}." if outer else "") for outer in found)
        if not inside and is_opaque(module):
            found[name] = module
    return found
