"""Loading and installing the allocator hook (``hook.c``)."""

from __future__ import annotations

import ctypes
import functools
from importlib.resources import files
from pathlib import Path

from tightfit.errors import HookUnavailable

_FILE = "tightfit_hook.so"
_VERSION = 11
MAKE_ROOM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
"""A function to free memory at a limit: missing bytes in, whether it freed any out."""
BEFORE_REFUSAL = ctypes.CFUNCTYPE(None, ctypes.c_int64)
"""The function that is called before a request is refused."""

_SIGNATURES: dict[str, tuple[object, tuple[object, ...] | None]] = {
    "tightfit_hook_version": (ctypes.c_int, ()),
    "tightfit_hook_install": (ctypes.c_char_p, (ctypes.c_char_p,)),
    "tightfit_hook_live_bytes": (ctypes.c_int64, ()),
    "tightfit_hook_peak_open": (ctypes.c_int, ()),
    "tightfit_hook_peak_close": (None, (ctypes.c_int,)),
    "tightfit_hook_peak_bytes": (ctypes.c_int64, (ctypes.c_int,)),
    "tightfit_hook_peak_take": (ctypes.c_int64, (ctypes.c_int,)),
    "tightfit_hook_peak_reset": (None, (ctypes.c_int,)),
    "tightfit_hook_tally_open": (ctypes.c_int, ()),
    "tightfit_hook_tally_close": (None, (ctypes.c_int,)),
    "tightfit_hook_tally_allocated_bytes": (ctypes.c_int64, (ctypes.c_int,)),
    "tightfit_hook_tally_take_peak": (ctypes.c_int64, (ctypes.c_int,)),
    "tightfit_hook_tally_describe": (
        None,
        (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p),
    ),
    "tightfit_hook_tally_set_limit": (None, None),  # a number and two of c_int64
    "tightfit_hook_tally_make_room": (None, (ctypes.c_int, MAKE_ROOM)),
    "tightfit_hook_before_refusals": (None, (BEFORE_REFUSAL,)),
    "tightfit_hook_tally_refusals": (
        ctypes.c_int64,
        (ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)),
    ),
    "tightfit_hook_tally_counted_bytes": (
        ctypes.c_int64,
        (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int64),
    ),
    "tightfit_hook_lost_blocks": (ctypes.c_int64, ()),
    "tightfit_hook_record_begin": (ctypes.c_int, ()),
    "tightfit_hook_record_end": (
        ctypes.c_int64,
        (ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)),
    ),
    "tightfit_hook_record_read": (None, (ctypes.POINTER(ctypes.c_int64),)),
    "tightfit_replay_open": (ctypes.c_int, (ctypes.c_int64,)),
    "tightfit_replay_close": (None, (ctypes.c_int,)),
    "tightfit_replay_drop_pages": (None, (ctypes.c_int,)),
    "tightfit_replay_resident": (ctypes.c_int64, (ctypes.c_int,)),
    "tightfit_replay_add": (
        ctypes.c_int,
        (
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.POINTER(ctypes.c_int64),
            ctypes.POINTER(ctypes.c_int64),
            ctypes.POINTER(ctypes.c_int32),
        ),
    ),
    "tightfit_replay_begin": (ctypes.c_int, (ctypes.c_int, ctypes.c_int)),
    "tightfit_replay_end": (None, (ctypes.POINTER(ctypes.c_int64),)),
    "tightfit_replay_interrupt": (None, ()),
    "tightfit_replay_resume": (None, ()),
    "tightfit_replay_alive": (ctypes.c_int64, (ctypes.c_int,)),
    "tightfit_replay_wanted": (None, (ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))),
    "tightfit_replay_poison": (None, (ctypes.c_int,)),
}


def hook_available() -> bool:
    """Whether the hook is installed, or could be installed just now."""
    return hook_unavailable_reason() is None


def hook_unavailable_reason() -> str | None:
    """Return why the hook cannot be installed in this process, or None if it is installed."""
    return _install()[1]


def installed_hook() -> ctypes.CDLL:
    """Return the hook's library, installed into c10.

    The first call installs it, for the life of the process. Memory that was allocated before is
    never counted, also when it is freed or resized later.

    Raises `HookUnavailable` if it was not built, or if c10's allocator is not the version it was
    written for.
    """
    library, reason = _install()
    if library is None:
        raise HookUnavailable(
            f"the allocator hook cannot be installed: {reason}. Peaks on the CPU can then only "
            "be measured around one call, with tightfit.allocator.measure_peak or ProfilerMeter"
        )
    return library


@functools.cache
def _install() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        library = _load(str(files("tightfit.allocator").joinpath(_FILE)))
    except OSError as error:
        return None, f"{_FILE} was not built or cannot be loaded ({error})"
    if library.tightfit_hook_version() != _VERSION:
        return None, f"{_FILE} is of version {library.tightfit_hook_version()}, not {_VERSION}"
    reason = library.tightfit_hook_install(_path_of_c10().encode())
    return (None, reason.decode()) if reason else (library, None)


def _load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        # without types, ctypes calls functions several times as fast
        if arguments not in (None, (ctypes.c_int,)):
            function.argtypes = arguments
    return library


def _path_of_c10() -> str:
    import torch

    return str(Path(torch.__file__).parent / "lib" / "libc10.so")
