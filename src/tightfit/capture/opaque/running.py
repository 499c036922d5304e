"""Whether an opaque module runs: what is fitted within it runs without a plan then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_RUNNING = threading.local()


def in_opaque_call() -> bool:
    """Whether an opaque module runs in this thread.

    A fitted recurrent module is an opaque module of its own graph: it runs again in backward.
    """
    return getattr(_RUNNING, "now", False)


@contextlib.contextmanager
def opaque_call() -> Iterator[None]:
    """Run an opaque module."""
    before = in_opaque_call()
    _RUNNING.now = True
    try:
        yield
    finally:
        _RUNNING.now = before
