"""Which Python code a traced forward has run, and which impure builtins it has called."""

from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import gc
import io
import logging
import os
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import numpy
import torch

from tightfit._core import _engine
from tightfit.torch_private import traces as private

__all__ = ["Executed", "Listener", "is_library", "is_ours", "unheard"]

_CLOCKS = (
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time "
    "process_time_ns thread_time thread_time_ns localtime gmtime ctime"
)
_IMPURE = (
    *(getattr(time, name) for name in _CLOCKS.split()),
    os.urandom,
    io.open,
    builtins.input,
    datetime.datetime.now,
    datetime.datetime.utcnow,
    datetime.datetime.today,
    datetime.date.today,
)
"""Builtins that tell something else each time, whatever they are given."""
_OF_THIS_PROCESS = (
    os.stat,
    os.access,
    os.listdir,
    os.scandir,
    os.getcwd,
    os.getpid,
    os.getppid,
    os.cpu_count,
    os.uname,
)
"""Builtins that may well tell something else in another process."""
_IMPURE_CODE = {
    function.__code__: f"uuid.{function.__name__}" for function in (uuid.uuid1, uuid.uuid4)
}
_ENVIRONMENT = type(os.environ).__getitem__.__code__

_PATHS = sysconfig.get_paths()
_SITE_PACKAGES = (_PATHS["purelib"], _PATHS["platlib"])
_STANDARD = (_PATHS["stdlib"], _PATHS["platstdlib"], "<frozen ")
_OWN = str(Path(__file__).parents[2])
_OWN_LIBRARIES = ("torch", "torchgen", "numpy", "sympy", "mpmath", "networkx")
_INSTALLED = {*_SITE_PACKAGES, *(str(Path(m.__file__ or "").parents[1]) for m in (torch, numpy))}
_UNREAD = (_OWN, *(f"{folder}/{name}/" for folder in _INSTALLED for name in _OWN_LIBRARIES))


@dataclass(frozen=True)
class Executed:
    """What a trace has run.

    Parameters
    ----------
    codes : tuple of (code, dict)
        Code of the user and of libraries, each with its globals; neither PyTorch's nor ours.
    impure : tuple of (code, str)
        Which of the user's called a builtin that tells something else each time.
    reads_environment : bool
        Whether the environment was asked for a variable.
    asks_process : bool
        Whether anything was asked that another process may well be told otherwise.
    """

    codes: tuple[tuple[CodeType, Mapping[str, Any]], ...] = ()
    impure: tuple[tuple[CodeType, str], ...] = ()
    reads_environment: bool = False
    asks_process: bool = False


class Listener:
    """Hears, while it is entered, what this thread runs."""

    def __init__(self) -> None:
        heard = (*_IMPURE, *_OF_THIS_PROCESS)
        self._engine = _engine.ExecutedCode(heard, (*_IMPURE_CODE, _ENVIRONMENT))

    def __enter__(self) -> Listener:
        _LISTENING.append(self)
        self._engine.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.stop()
        _LISTENING.remove(self)

    def pause(self) -> None:
        """Hear nothing until resumed as often."""
        self._engine.pause()

    def resume(self) -> None:
        """Hear again."""
        self._engine.resume()

    def without_operators(self) -> AbstractContextManager[None]:
        """Hear nothing of what PyTorch does to trace one of its own operators: no user's code."""
        return private.operators_between(self._engine.mute, self._engine.unmute)

    def executed(self) -> Executed:
        """Return what was heard."""
        beside = {getattr(callback, "__code__", None) for callback in gc.callbacks}
        codes = tuple(
            (code, held)
            for code, held in self._engine.codes
            if not _is_unread(code.co_filename)
            and not _is_made(held.get("__name__"))
            and code not in beside
        )
        calls = [(called, _first_unusual(callers)) for called, callers in self._engine.calls]
        read = [(called, code) for called, code in calls if not _is_unread(code.co_filename)]
        impure = tuple(
            (code, _name_of(called))
            for called, code in read
            if called != _ENVIRONMENT
            and called not in _OF_THIS_PROCESS
            and code not in beside
            and not is_library(code.co_filename)
        )
        reads_environment = any(called == _ENVIRONMENT for called, _ in read)
        return Executed(codes, impure, reads_environment, self._asks_process())

    def _asks_process(self) -> bool:
        """Whether other code than PyTorch's was told of this process, but to note it in a log."""
        return any(
            called in _OF_THIS_PROCESS
            and not _is_unread(_first_unusual(callers).co_filename)
            and not any(code.co_filename == logging.__file__ for code in callers)
            for called, callers in self._engine.calls
        )


def _first_unusual(callers: tuple[CodeType, ...]) -> CodeType:
    """Return the nearest caller that is not part of the standard library."""
    return next((c for c in callers if not _is_standard(c.co_filename)), callers[-1])


_LISTENING: list[Listener] = []


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Run what every planned step runs, too: it reads by itself what is there then."""
    heard_by = tuple(_LISTENING)
    for listener in heard_by:
        listener.pause()
    try:
        yield
    finally:
        for listener in heard_by:
            listener.resume()


def _name_of(called: Any) -> str:
    if isinstance(called, CodeType):
        return _IMPURE_CODE[called]
    owner = getattr(called, "__self__", None)
    module = getattr(owner, "__name__", None) or getattr(called, "__module__", None) or ""
    return f"{module}.{called.__name__}".removeprefix("builtins.").removeprefix("io.")


@functools.cache
def _is_unread(file: str) -> bool:
    """Whether what code in a file reads is not looked at: PyTorch, us, the standard library."""
    return file.startswith(_UNREAD) or _is_standard(file)


@functools.cache
def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD) and not file.startswith(_SITE_PACKAGES)


@functools.cache
def is_library(file: str | None) -> bool:
    """Whether a file was installed, or has none: its module's globals are taken for constants."""
    return file is None or file.startswith(_SITE_PACKAGES) or _is_unread(file)


def _is_made(module: str | None) -> bool:
    """Whether code was made by PyTorch or the standard library: methods of dataclasses, say."""
    return module is None or module.startswith(("namedtuple_", "_editable_")) or is_ours(module)


def is_ours(module: str | None) -> bool:
    """Whether a module of this name is PyTorch's, ours or part of the standard library."""
    top = (module or "builtins").partition(".")[0]
    return top in ("tightfit", *_OWN_LIBRARIES) or (
        top in sys.stdlib_module_names and top != "__main__"
    )
