"""Bytes allocated since a moment and still alive, and a limit for them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from tightfit.allocator.cuda_tally import CudaTally, Refusals
from tightfit.allocator.hook import BEFORE_REFUSAL, MAKE_ROOM, installed_hook
from tightfit.allocator.refusal_details import RefusalDetails
from tightfit.allocator.resident import storages_of
from tightfit.errors import HookUnavailable
from tightfit.progress import announce

_NO_LIMIT = (1 << 63) - 1


class _NoPlaceLeft(HookUnavailable):
    """There are as many tallies as there can be."""


class Tally(Protocol):
    """Counts the bytes allocated on a device since it was made, as long as they are held."""

    refuses: bool  # whether it can refuse requests above a limit
    limit: tuple[int, int] | None  # in bytes, with the bytes before; see `set_limit`

    def allocated_bytes(self) -> int:
        """Return the bytes allocated since and still held."""

    def counted_bytes(self, tensors: Iterable[Any]) -> int:
        """Return the bytes of those storages of tensors that are among them."""

    def set_limit(self, limit_bytes: int | None, before_bytes: int) -> None:
        """Refuse requests from now on that would exceed a limit, where the device can.

        `limit_bytes`: for counted bytes and for those before; None: no limit. `before_bytes`: bytes
        that existed before and count against the limit, too.
        """

    def describe_refusals(self, details: RefusalDetails) -> None:
        """Have errors of refused requests say this."""

    def refusals(self) -> Refusals:
        """Return the refusals of the limit so far."""


class CpuTally:
    """A tally of PyTorch's CPU allocator, by the allocator hook: exact, from every thread.

    A request beyond the limit raises the exception of c10 that becomes a ``RuntimeError``, in
    whichever thread made it. At most 64 tallies exist at once.

    Raises `HookUnavailable` if the hook cannot be installed, or 64 tallies exist already.
    """

    refuses = True

    def __init__(self) -> None:
        self._hook = installed_hook()
        self._hook.tightfit_hook_before_refusals(_BEFORE_REFUSALS)
        self._slot = self._hook.tightfit_hook_tally_open()
        if self._slot < 0:
            gc.collect()  # models that are not used any more have released theirs then
            self._slot = self._hook.tightfit_hook_tally_open()
        if self._slot < 0:
            raise _NoPlaceLeft(
                "64 fitted models exist in this process already: drop those that are not used"
            )
        self._make_room = MAKE_ROOM()
        self.limit: tuple[int, int] | None = None
        self._limit, self._before = ctypes.c_int64(), ctypes.c_int64()
        self.describe_refusals(RefusalDetails())
        closing = weakref.finalize(self, self._hook.tightfit_hook_tally_close, self._slot)
        closing.atexit = False

    def allocated_bytes(self) -> int:
        return self._hook.tightfit_hook_tally_allocated_bytes(self._slot)

    def counted_bytes(self, tensors: Iterable[Any]) -> int:
        storages = (s for s in storages_of(tensors) if s.device.type != "meta")  # shapes alone
        addresses = {s.data_ptr() for s in storages} - {0}
        blocks = (ctypes.c_uint64 * len(addresses))(*addresses)
        count = self._hook.tightfit_hook_tally_counted_bytes
        return int(count(self._slot, blocks, len(addresses)))

    def set_limit(self, limit_bytes: int | None, before_bytes: int) -> None:
        now = None if limit_bytes is None else (limit_bytes, before_bytes)
        if now == self.limit:
            return
        self.limit = now
        self._limit.value = _NO_LIMIT if limit_bytes is None else limit_bytes
        self._before.value = before_bytes
        self._hook.tightfit_hook_tally_set_limit(self._slot, self._limit, self._before)

    def describe_refusals(self, details: RefusalDetails) -> None:
        texts = _lasting(details.origin.sentence), _lasting(details.origin.ways)
        self._hook.tightfit_hook_tally_describe(
            self._slot, details.budget_bytes, details.coming_bytes, *texts
        )

    def make_room_by(self, free: Callable[[int], bool] | int | None) -> None:
        """Call a function where the limit would be exceeded; refuse if it frees nothing.

        `free`: a function, or the address of a function in C, of the bytes that lack; returns
        whether it freed any. Runs inside the allocator, in any thread that allocates: it must not
        raise. None: refuse at once.
        """
        asked = MAKE_ROOM() if free is None else MAKE_ROOM(free)
        self._hook.tightfit_hook_tally_make_room(self._slot, asked)
        self._make_room = asked  # the previous callback must live until it is replaced

    def take_peak_bytes(self) -> int:
        """Return the most that was allocated at once; the peak starts again from now."""
        return int(self._hook.tightfit_hook_tally_take_peak(self._slot))

    def refusals(self) -> Refusals:
        asked, held = ctypes.c_int64(), ctypes.c_int64()
        count = self._hook.tightfit_hook_tally_refusals(
            self._slot, ctypes.byref(asked), ctypes.byref(held)
        )
        return Refusals(int(count), asked.value, held.value)


@functools.cache
def _lasting(text: str) -> bytes:
    """Return a text that lives as long as the process: the hook reads it at any time."""
    return text.encode()


def before_refusals(action: Callable[[], None]) -> None:
    """Call a function before any limit refuses a request, after a collection of garbage.

    It may change limits. It runs inside the allocator, in a thread that Python knows: it must not
    raise, and gets no memory from PyTorch.
    """
    _ACTIONS.append(action)


def describe_before_refusals(describe: Callable[[int, bool], None]) -> None:
    """Call a function before any limit refuses a request for which nothing more can be freed.

    It receives the bytes that the limit lacks for it, and whether the request is optional: then its
    error is not read, and must not take time to describe. It runs as `before_refusals` says.
    """
    _DESCRIBING.append(describe)


def free_before_refusals(free: Callable[[int, torch.device], int]) -> None:
    """Call a function of the bytes that lack on a device before any limit refuses a request.

    It frees what costs time to make again, and returns how many bytes that were. It is called as
    `before_refusals` says, after those functions, and not for `optional_requests`.
    """
    _FREEING.append(free)


@contextlib.contextmanager
def optional_requests() -> Iterator[None]:
    """Free nothing for requests that may be refused, if it costs time to make that again."""
    before = getattr(_OPTIONAL, "now", False)
    _OPTIONAL.now = True
    try:
        yield
    finally:
        _OPTIONAL.now = before


def _before_refusals(lacking_bytes: int) -> None:
    for action in _ACTIONS:
        action()
    is_optional = getattr(_OPTIONAL, "now", False)
    freed_bytes = 0 if is_optional else free_for(lacking_bytes, _CPU)
    if freed_bytes < lacking_bytes:
        for describe in _DESCRIBING:
            describe(lacking_bytes - freed_bytes, is_optional)


def free_for(lacking_bytes: int, device: torch.device) -> int:
    """Free what costs time to make again, for as many bytes; return how many are free then."""
    freed_bytes = 0
    for free in _FREEING:
        if freed_bytes < lacking_bytes:
            freed_bytes += free(lacking_bytes - freed_bytes, device)
    return freed_bytes


_ACTIONS: list[Callable[[], None]] = []
_DESCRIBING: list[Callable[[int, bool], None]] = []
_FREEING: list[Callable[[int, torch.device], int]] = []
_CPU = torch.device("cpu")
_OPTIONAL = threading.local()
_BEFORE_REFUSALS = BEFORE_REFUSAL(_before_refusals)


def tally_for(device: torch.device, before: Iterable[Any]) -> Tally | None:
    """Return a new tally of a device; None where there can be none.

    `device`: a CPU or a GPU. `before`: tensors that are there already, and are asked about later.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return CudaTally(device, before)
    if device.type != "cpu":
        return None
    try:
        return CpuTally()
    except _NoPlaceLeft as error:
        announce(f"{error}. Requests above the budget of one more are not refused")
        return None
    except HookUnavailable:
        return None
