"""Bytes allocated on a GPU since a moment, and a limit for the bytes its allocator may reserve."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tightfit.allocator.caching import return_cached
from tightfit.allocator.meter import CudaMeter
from tightfit.allocator.refusal_details import RefusalDetails
from tightfit.allocator.resident import storages_of
from tightfit.torch_private.gpu.allocator_settings import expand_segments
from tightfit.units import format_bytes, parse_bytes

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_REFUSING = re.compile(r"GPU (\d+) has")


@dataclass(frozen=True)
class Refusals:
    """The requests that a limit has refused."""

    count: int = 0  # how many
    # asked_bytes, held_bytes: the size of the last, and bytes held then
    asked_bytes: int = 0
    held_bytes: int = 0


class CudaTally:
    """A tally of PyTorch's CUDA allocator: bytes allocated now minus bytes allocated then.

    The limit is PyTorch's own (`set_per_process_memory_fraction`), for bytes that the allocator
    reserves: cached blocks and gaps between blocks count, whichever code asks. Bytes reserved
    before, and not counted, are added; blocks cached then go back first, as they would be added,
    too. Of several tallies the least limit holds, and none is above the user's own.

    `before`: tensors that are there already, and are asked about later. `restarts_peak`: whether
    the peak starts from now, that of the user as well.
    """

    refuses = True
    _limited: ClassVar[weakref.WeakSet[CudaTally]] = weakref.WeakSet()
    _users_own: ClassVar[dict[int, float]] = {}  # fractions, of devices that have a limit of ours

    def __init__(
        self, device: torch.device, before: Iterable[Any], *, restarts_peak: bool = False
    ) -> None:
        return_cached(device)
        self._meter = CudaMeter(device)
        if restarts_peak:
            self._meter.reset_peak()
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._start = self._meter.live_bytes()
        self._reserved_start = self._meter.held_bytes()
        self._before = {s.data_ptr() for s in storages_of(before)}
        self.limit: tuple[int, int] | None = None
        self._limit_bytes = self._before_bytes = 0
        self._details = RefusalDetails()
        weakref.finalize(self, self._apply, self._index).atexit = False

    def allocated_bytes(self) -> int:
        return self._meter.live_bytes() - self._start

    def take_peak_bytes(self) -> int:
        """Return the most that was allocated at once; the peak is PyTorch's, and goes on."""
        return self._meter.peak_bytes() - self._start

    def asked_so_far_bytes(self) -> int:
        """Return the bytes of all requests so far, requests that are given back included."""
        return self._meter.asked_so_far_bytes()

    def counted_bytes(self, tensors: Iterable[Any]) -> int:
        """Return the bytes of the storages of tensors that were not there before."""
        sizes = {s.data_ptr(): s.nbytes() for s in storages_of(tensors) if s.device.type == "cuda"}
        return sum(n for address, n in sizes.items() if address not in self._before)

    def set_limit(self, limit_bytes: int | None, before_bytes: int) -> None:
        """Have the allocator reserve no more than a limit from now on, uncounted bytes aside."""
        now = None if limit_bytes is None else (limit_bytes, before_bytes)
        if now == self.limit:
            return
        self.limit = now
        if now is None:
            self._limited.discard(self)
        else:
            self._limit_bytes, self._before_bytes = now
            if self not in self._limited:
                expand_segments()  # holes between blocks would count, too
            self._limited.add(self)
        self._apply(self._index)

    def describe_refusals(self, details: RefusalDetails) -> None:
        self._details = details

    def refusals(self) -> Refusals:
        """Return no refusals: PyTorch tells of them only by errors."""
        return Refusals()

    @property
    def _most_reserved_bytes(self) -> int:
        return self._limit_bytes + max(0, self._reserved_start - self._before_bytes)

    @classmethod
    def _apply(cls, index: int) -> None:
        """Set the least of all limits, or the user's own again."""
        limits = [tally._most_reserved_bytes for tally in cls._limited if tally._index == index]
        if not limits:
            if index in cls._users_own:
                torch.cuda.set_per_process_memory_fraction(cls._users_own.pop(index), index)
            return
        if index not in cls._users_own:
            cls._users_own[index] = _fraction(index)
        total = torch.cuda.get_device_properties(index).total_memory
        fraction = (min(limits) + 0.5) / total  # PyTorch rounds down to bytes
        torch.cuda.set_per_process_memory_fraction(min(fraction, cls._users_own[index]), index)

    def _described(self, error: BaseException) -> str:
        """Describe a refusal of PyTorch in terms of the budget."""
        asked = _ASKED.search(str(error))
        asked_bytes = parse_bytes(asked[1].replace("bytes", "B")) if asked else 0
        held_bytes = self.allocated_bytes() + self._before_bytes
        cached_bytes = max(0, self._meter.held_bytes() - self._meter.live_bytes())
        named = held_bytes + asked_bytes + max(asked_bytes, held_bytes // 8)
        details = self._details
        named = max(named + details.coming_bytes, details.budget_bytes)
        return (
            f"tightfit: the budget of {self._limit_bytes} bytes "
            f"({format_bytes(self._limit_bytes)}) has no room for a further {asked_bytes} bytes "
            f"({format_bytes(asked_bytes)}): {held_bytes} bytes ({format_bytes(held_bytes)}) are "
            f"held now, and {format_bytes(cached_bytes)} reserved and not allocated. "
            f"{details.origin.sentence}. Try a budget of {named} bytes ({format_bytes(named)}), or "
            f"hold less{details.origin.ways}; tightfit.unfit ends the limit of a model"
        )


def _fraction(index: int) -> float:
    """Return the part of a device for this process; older releases do not tell."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if read is None else read(index)


def budget_refusal(error: BaseException) -> str | None:
    """Describe a refusal of a GPU's allocator in terms of its least budget; None: it has none."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    refusing = _REFUSING.search(str(error))
    limited = [
        tally
        for tally in CudaTally._limited
        if refusing is None or tally._index == int(refusing[1])
    ]
    least = min(limited, key=lambda tally: tally._most_reserved_bytes, default=None)
    return least._described(error) if least is not None else None
