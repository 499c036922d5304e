"""Finds objects among all that live in the process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tightfit._core import _engine


def alive(kinds: Iterable[type]) -> list[Any]:
    """Return the living objects of some classes; classes derived from them are others.

    No other thread runs meanwhile. Python's own `gc.get_objects` hands out tuples that another
    thread has only half made. Making them then fails there (``SystemError: bad argument to internal
    function``) if this thread is stopped while it holds them.
    """
    return _engine.alive(kinds)
