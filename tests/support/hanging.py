"""Functions that never answer, to be run in a child process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tightfit.planners.child import run_in_child


def hang(payload: bytes, report: Callable[[bytes], None]) -> None:
    """Report what was received, then sleep for longer than any test runs."""
    report(payload)
    time.sleep(600)


def beat(payload: bytes, report: Callable[[bytes], None]) -> None:
    """Touch a file again and again: whoever looks at it sees that this process is alive."""
    report(b"")
    while True:
        Path(payload.decode()).touch()
        time.sleep(0.05)


def beat_below(payload: bytes, report: Callable[[bytes], None]) -> None:
    """Let a child of this process touch a file again and again."""
    run_in_child(f"{__name__}:beat", payload, seconds=600, on_report=report)
