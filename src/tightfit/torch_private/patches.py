"""Methods of PyTorch that are replaced in the threads that ask for it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


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

        `replacement`: gets the original as its first argument, then those of the call.
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
