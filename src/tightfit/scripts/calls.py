"""Every call of a module that no other module makes, seen before it begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_CALL = "__call__"
_INIT_SUBCLASS = "__init_subclass__"


class OutermostCalls:
    """Calls a function with each module that is about to be called, unless by another module.

    A hook of all modules would come too late: `nn.Module` looks up which forward to run before it
    calls hooks, and a module fitted there would run plainly once more. A class may also have a
    `__call__` of its own, which runs no hooks. Within such a call no class is patched, for code
    that traces or compiles it.
    """

    def __init__(self, before: Callable[[nn.Module], None]) -> None:
        self._before = before
        self._originals: dict[type[nn.Module], Callable[..., Any]] = {}
        self._wrappers: dict[type[nn.Module], Callable[..., Any]] = {}

    def __enter__(self) -> None:
        for cls in _with_subclasses(nn.Module):
            self._wrap(cls)
        wrap = self._wrap

        def init_subclass(cls: type[nn.Module], **keywords: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**keywords)
            wrap(cls)

        setattr(nn.Module, _INIT_SUBCLASS, classmethod(init_subclass))
        _set_calls(self._wrappers)

    def __exit__(self, *error: Any) -> None:
        delattr(nn.Module, _INIT_SUBCLASS)
        _set_calls(self._originals)

    def _wrap(self, cls: type[nn.Module]) -> None:
        """Patch a class that defines `__call__` itself."""
        original = vars(cls).get(_CALL)
        is_patched = cls is nn.Module or not cls.__module__.startswith("torch.")
        if original is not None and is_patched and cls not in self._originals:
            self._originals[cls] = original
            self._wrappers[cls] = self._wrapper(original)
            setattr(cls, _CALL, self._wrappers[cls])

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or _is_of_tightfit(type(module).__module__):
                return original(module, *args, **kwargs)
            _set_calls(self._originals)
            try:
                self._before(module)
                return original(module, *args, **kwargs)
            finally:
                _set_calls(self._wrappers)

        return wrapper


def _is_of_tightfit(name: str) -> bool:
    """Whether a class is of tightfit itself, which runs a step again in a backward."""
    return name.startswith("tightfit.") and not name.startswith("tightfit.zoo.")


def _set_calls(calls: dict[type[nn.Module], Callable[..., Any]]) -> None:
    for cls, call in calls.items():
        setattr(cls, _CALL, call)


def _with_subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)
