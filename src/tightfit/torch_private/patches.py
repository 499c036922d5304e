"""Methods of PyTorch that are replaced in the threads that ask for it."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily


class Patch:
    """A function or a method that one thread replaces for a while, and other threads do not see.

    It is put back once no thread replaces it, in any order of their ends.

    `owner`: has it among its attributes.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._own: Any = None  # to be put back; None: it is inherited
        self._original: Any = None
        self._replacing = threading.local()
        self._lock = threading.Lock()
        self._count = 0

    @contextlib.contextmanager
    def by(self, replacement: Callable[..., Any]) -> Iterator[None]:
        """Let this thread run another function instead.

        `replacement`: gets the original as its first argument, then the arguments of the call.
        """
        self._enter()
        before = getattr(self._replacing, "function", None)
        self._replacing.function = functools.partial(replacement, before or self._original)
        try:
            yield
        finally:
            self._replacing.function = before
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            self._count += 1
            if self._count > 1:
                return
            self._own = vars(self._owner).get(self._name)
            is_static = isinstance(self._own, staticmethod)
            original = self._original = getattr(self._owner, self._name)

            @functools.wraps(original)
            def chosen(*args: Any, **kwargs: Any) -> Any:
                function = getattr(self._replacing, "function", None) or original
                return function(*args, **kwargs)

            setattr(self._owner, self._name, staticmethod(chosen) if is_static else chosen)

    def _leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count:
                return
            if self._own is None:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._own)


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give a class, a module or an object other attributes for a while, for all threads."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:  # it is inherited
                delattr(owner, name)


_ASKS = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
_ASKING: dict[tuple[str, str], Patch] = {}


def inside_of(function: Any, mode: TorchFunctionMode) -> AbstractContextManager[Any] | None:
    """Return a context in which a mode sees what a Python function of PyTorch calls, not itself.

    None: the function is not one in Python that asks whether a mode is to run it.
    """
    module = getattr(function, "__module__", None)
    names = getattr(function, "__globals__", {}).keys() & _ASKS
    if module not in sys.modules or not names:
        return None
    stack = contextlib.ExitStack()
    for name in sorted(names):
        patch = _ASKING.setdefault((module, name), Patch(sys.modules[module], name))
        stack.enter_context(patch.by(_asked_without_mode))
    stack.enter_context(mode)
    return stack


def _asked_without_mode(asked: Callable[..., bool], *args: Any) -> bool:
    if not torch._C._is_torch_function_mode_enabled():
        return asked(*args)
    with _pop_mode_temporarily():
        return asked(*args)
