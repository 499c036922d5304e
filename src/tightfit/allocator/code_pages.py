"""Pages of libraries' code: they can be given back at any time, for their files hold them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ +(/.*)$")
_DONTNEED = 4  # of madvise
_EXECUTABLE = "r-xp"


def drop_code_pages() -> None:
    """Give pages of code back to the system; they are mapped again when they are reached.

    Most code that was run so far is not run again: of importing, capturing and planning. Only
    mappings of files that can be executed and not written are touched, and only if no page of them
    was changed. Does nothing where the system does not list them.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end in _unchanged_code():
        advise(begin, end - begin, _DONTNEED)


def _unchanged_code() -> list[tuple[int, int]]:
    """Return begin and end of the mappings of code in which no page was ever written."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    mapping: tuple[int, int] | None = None
    for line in lines:
        header = _MAPPING.match(line)
        if header is not None:
            begin, end = (int(header[number], 16) for number in (1, 2))
            mapping = (begin, end) if header[3] == _EXECUTABLE else None
        elif mapping is not None and line.startswith("Anonymous:"):
            if line.split()[1] == "0":
                found.append(mapping)
            mapping = None
    return found
