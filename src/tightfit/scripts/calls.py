"""Every call of a module that no other module makes, seen before it begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_CALL = "__call__"
_DERIVED = "__init_subclass__"


class OutermostCalls:
    """Says of every call of a module before it begins, unless it is within another.

    A hook of all modules would come too late: `nn.Module` looks up which forward to run before it
    calls hooks, and a module fitted there would run plainly once more. A class may have a way to be
    called of its own, which looks at no hooks. Within such a call all classes are unchanged for
    code that traces or compiles it.

    `before`: called with the module.
    """

    def __init__(self, before: Callable[[nn.Module], None]) -> None:
        self._before = before
        self._originals: dict[type[nn.Module], Callable[..., Any]] = {}
        self._seeing: dict[type[nn.Module], Callable[..., Any]] = {}

    def __enter__(self) -> None:
        for kind in _with_derived(nn.Module):
            self._meet(kind)
        meet = self._meet

        def derived(kind: type[nn.Module], **keywords: Any) -> None:
            super(nn.Module, kind).__init_subclass__(**keywords)
            meet(kind)

        setattr(nn.Module, _DERIVED, classmethod(derived))
        _put(self._seeing)

    def __exit__(self, *error: Any) -> None:
        delattr(nn.Module, _DERIVED)
        _put(self._originals)

    def _meet(self, kind: type[nn.Module]) -> None:
        """Take note of a class that says how its modules are called."""
        original = vars(kind).get(_CALL)
        is_own = kind is nn.Module or not kind.__module__.startswith("torch.")
        if original is not None and is_own and kind not in self._originals:
            self._originals[kind] = original
            self._seeing[kind] = self._seen(original)
            setattr(kind, _CALL, self._seeing[kind])

    def _seen(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def seen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or _is_ours(type(module).__module__):
                return original(module, *args, **kwargs)
            _put(self._originals)
            try:
                self._before(module)
                return original(module, *args, **kwargs)
            finally:
                _put(self._seeing)

        return seen


def _is_ours(name: str) -> bool:
    """Whether a class is of tightfit itself, which runs a step again in a backward."""
    return name.startswith("tightfit.") and not name.startswith("tightfit.zoo.")


def _put(calls: dict[type[nn.Module], Callable[..., Any]]) -> None:
    for kind, call in calls.items():
        setattr(kind, _CALL, call)


def _with_derived(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _with_derived(derived)
