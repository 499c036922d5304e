"""Garbage collection while a step is captured: seldom, and of new objects only."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass

_OBJECTS = 50_000  # that are made between two collections


@dataclass
class _Before:
    """The garbage collector's settings outside of all open contexts, in any thread."""

    thresholds: tuple[int, int, int]
    has_frozen: bool
    contexts: int = 0


_LOCK = threading.Lock()
_INSIDE = threading.local()  # whether the thread is inside of a context
_FROZEN: list[bool] = []  # once the program was seen to have frozen objects
_BEFORE: list[_Before] = []  # its only entry is there while any context is open


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Let collections come seldom and skip objects that exist already.

    Tracing and pricing make many objects of which few die, in a process that has some hundred
    thousand: all of them would be walked through several times. Where the program has frozen its
    own objects, or collects still more seldom, that stays so. Garbage is gone at the end of a
    thread's outermost context: objects that still hold tensors then do not die by themselves.
    """
    if getattr(_INSIDE, "is_inside", False):
        yield
        return
    with _LOCK:
        before = _begun()
        before.contexts += 1
    _INSIDE.is_inside = True
    try:
        yield
    finally:
        _INSIDE.is_inside = False
        gc.collect()
        with _LOCK:
            before.contexts -= 1
            if not before.contexts:
                _end(_BEFORE.pop())


def _begun() -> _Before:
    if not _BEFORE:
        before = _Before(gc.get_threshold(), _has_frozen())
        _BEFORE.append(before)
        if 0 < before.thresholds[0] < _OBJECTS:
            gc.set_threshold(_OBJECTS, *before.thresholds[1:])
        if not before.has_frozen:
            gc.freeze()
    return _BEFORE[0]


def _has_frozen() -> bool:
    """Whether the program has frozen objects; they are counted one by one, so only until then."""
    if not _FROZEN and gc.get_freeze_count() > 0:
        _FROZEN.append(True)
    return bool(_FROZEN)


def _end(before: _Before) -> None:
    gc.set_threshold(*before.thresholds)
    if not before.has_frozen:
        gc.unfreeze()
