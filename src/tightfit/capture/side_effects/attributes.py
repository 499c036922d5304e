"""Tensors that a forward leaves in attributes of its modules: further results of the step.

`self.attention = weights`, or a head for deep supervision put into a list: every planned forward
leaves what it computed there, as the plain one does, and gradients flow through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from tightfit.torch_private import core as private

__all__ = ["KeptTensors", "Place", "WithKept", "forget", "put"]

Place: TypeAlias = tuple[str, str, Any]
"""Name of a module, of its attribute, and where in that: None for all of it."""

_BOOKKEEPING = frozenset(nn.Module().__dict__) | {"forward"}
_MISSING = object()


@dataclass
class WithKept:
    """The output of a forward, and the tensors that it leaves behind."""

    output: Any
    kept: dict[Place, Any]


def put(output: Any, modules: Mapping[str, nn.Module]) -> Any:
    """Leave tensors where the forward would have, if it leaves any; return its output."""
    if not isinstance(output, WithKept):
        return output
    for (name, attribute, key), tensor in output.kept.items():
        holder = _module(modules, name).__dict__
        if key is None:
            holder[attribute] = tensor
        else:
            holder[attribute][key] = tensor
    return output.output


def forget(modules: Mapping[str, nn.Module], places: Iterable[Place]) -> None:
    """Let go of what the last forward left: the next one's plan counts only its own."""
    for name, attribute, key in places:
        holder = _module(modules, name).__dict__
        if key is None and isinstance(holder.get(attribute), torch.Tensor):
            holder[attribute] = None
        elif key is not None and isinstance(holder[attribute][key], torch.Tensor):
            holder[attribute][key] = None


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
        self.places: frozenset[Place] = frozenset()
        self._function = function
        self._modules = modules

    def __call__(self, *args: Any, **kwargs: Any) -> WithKept:
        """Run the forward."""
        before = {
            f"{prefix}.{name}".rstrip("."): (module, _snapshot(module))
            for prefix, top in self._modules.items()
            for name, module in top.named_modules()
        }
        output = self._function(*args, **kwargs)
        kept: dict[Place, Any] = {}
        if private.is_tracing():
            for name, (module, attributes) in before.items():
                kept |= _taken_out(name, module.__dict__, attributes)
            self.places = frozenset(kept)
        return WithKept(output, kept)


def _module(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    prefix, _, path = name.partition(".")
    return modules[prefix].get_submodule(path)


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Return the attributes; of lists and dicts what they hold."""
    return {
        key: (value, dict(_elements(value)) if isinstance(value, list | dict) else {})
        for key, value in module.__dict__.items()
        if key not in _BOOKKEEPING
    }


def _elements(container: list[Any] | dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    return enumerate(container) if isinstance(container, list) else container.items()


def _taken_out(name: str, now: dict[str, Any], before: dict[str, Any]) -> dict[Place, Any]:
    """Return the traced tensors that are new, and put back what was in their places."""
    kept: dict[Place, Any] = {}
    for attribute in [key for key in now if key not in _BOOKKEEPING]:
        value, (old, elements) = now[attribute], before.get(attribute, (_MISSING, {}))
        if value is old and isinstance(value, list | dict):
            for key, element in list(_elements(value)):
                if key in elements and element is not elements[key] and _is_traced(element):
                    kept[name, attribute, key] = element
                    value[key] = elements[key]
        elif value is not old and _is_traced(value):
            kept[name, attribute, None] = value
            if old is _MISSING:
                del now[attribute]
            else:
                now[attribute] = old
    return kept


def _is_traced(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and private.is_traced(value)
