"""Why Dynamo makes a further graph of code that it has followed before. Private names of torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch._dynamo import convert_frame

from tightfit.torch_private.patches import Patch

_MOST = 3  # graphs whose guards are named


@contextlib.contextmanager
def noting_failed_guards() -> Iterator[None]:
    """Note which guards do not hold of graphs made before, while a frame is followed."""

    def noted(find: Any, *args: Any, **kwargs: Any) -> list[str]:
        reasons: list[str] = find(*args, **kwargs)
        _FAILED.guards = "; ".join(list(dict.fromkeys(map(_in_words, reasons)))[:_MOST])
        return reasons

    before = getattr(_FAILED, "guards", "")
    _FAILED.guards = ""
    try:
        with _REASONS.by(noted):
            yield
    finally:
        _FAILED.guards = before


def why_recompiled() -> str:
    """Return the guards that have failed, in this thread; "" if there was no graph before."""
    return getattr(_FAILED, "guards", "")


def _in_words(reason: str) -> str:
    """Return a guard as Dynamo prints it, without a graph's number, a line of code and advice."""
    first = reason.strip().splitlines()[0]
    _, _, guard = first.partition(": ")
    guard = (guard or first).partition("  # ")[0].partition(". Guard failed")[0]
    return guard.strip().replace("function.__self__", "self")


_FAILED = threading.local()
_REASONS = Patch(convert_frame, "get_and_maybe_log_recompilation_reasons")
