"""Garbage collection while a step is traced: seldom, and through what the trace makes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["fewer_collections"]

_OBJECTS = 50_000  # that are made between two collections


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Let collections come seldom and pass by what is there already.

    A trace makes many objects of which few die, in a process that has some hundred thousand: all
    of them would be walked through several times. Where the program has frozen its own objects,
    or collects still more seldom, that stays so.
    """
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    if 0 < thresholds[0] < _OBJECTS:
        gc.set_threshold(_OBJECTS, *thresholds[1:])
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()
