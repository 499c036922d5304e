"""Garbage collection while a step is captured: seldom, and through what that makes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["fewer_collections"]

_OBJECTS = 50_000  # that are made between two collections
_YOUNG = 1  # generations: those of objects that have lived through one collection at most
_FROZEN_HERE: list[bool] = []  # of each of these contexts that is open


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Let collections come seldom and pass by what is there already.

    A trace, and what prices it, makes many objects of which few die, in a process that has some
    hundred thousand: all of them would be walked through several times. Where the program has
    frozen its own objects, or collects still more seldom, that stays so. Garbage of the trace is
    gone at its end: what still holds its tensors then is nothing that dies by itself.
    """
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    if 0 < thresholds[0] < _OBJECTS:
        gc.set_threshold(_OBJECTS, *thresholds[1:])
    if not frozen:
        gc.freeze()
    _FROZEN_HERE.append(not frozen)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if any(_FROZEN_HERE):
            gc.collect()
        else:
            gc.collect(_YOUNG)
        if _FROZEN_HERE.pop():
            gc.unfreeze()
