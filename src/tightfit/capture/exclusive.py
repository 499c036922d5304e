"""One capture at a time, repeated where a leaf has kept more than it was measured to keep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tightfit.errors import OpaqueChanged

_T = TypeVar("_T")

CAPTURE_LOCK = threading.RLock()
"""The tracer of PyTorch patches classes while it runs: one thread at a time may capture.

Dynamo takes these patches away while it follows a frame, and puts them back afterwards: for good,
if another thread's trace has ended meanwhile.
"""
_MOST_ATTEMPTS = 8


def capture_exclusively(capture: Callable[[], _T]) -> _T:
    """Return a step, captured while no other thread captures.

    Raises `OpaqueChanged` if a leaf keeps more each time it runs, for any room that it is given.
    """
    with CAPTURE_LOCK:
        for _ in range(_MOST_ATTEMPTS - 1):
            try:
                return capture()
            except OpaqueChanged:  # next time there is room for the tensors it kept
                continue
        return capture()
