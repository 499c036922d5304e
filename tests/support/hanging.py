"""A function that never answers, to be run in a child process."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["hang"]


def hang(payload: bytes, report: Callable[[bytes], None]) -> None:
    """Report what was received, then sleep for longer than any test runs."""
    report(payload)
    time.sleep(600)
