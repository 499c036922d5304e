"""Garbage collection while a step is traced: through what the trace makes, not all there is."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["old_objects_left_alone"]


@contextlib.contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Let collections pass by what is there already: a trace makes many objects, and few die.

    A process with PyTorch has some hundred thousand objects, and a trace makes so many that all of
    them would be walked through several times. Where the program has frozen its own, they stay so.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
