"""The limit of a region, kept inside the allocator: operators' workspace counts."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch

from tightfit.allocator.alive import alive
from tightfit.allocator.refusals import is_refusal, refused_bytes, unless_refused
from tightfit.allocator.resident import granularity_of, storages_of
from tightfit.allocator.tally import CpuTally, CudaTally, Refusals
from tightfit.torch_private.storages import new_memory
from tightfit.units import rounded_up

Result = TypeVar("Result")
_CPU = torch.device("cpu")


class Room(ABC):
    """Bytes allocated on a device, bytes that existed before, and the limit of both.

    `device`: with its index, if it is a GPU. Raises `HookUnavailable` if the allocator hook cannot
    be installed.
    """

    retries = False
    """Whether code that asks for memory meets refusals, and has to run again."""

    def __init__(self, limit_bytes: int, before_bytes: int, device: torch.device = _CPU) -> None:
        self.limit_bytes = limit_bytes
        self.device = device
        self._before_bytes = before_bytes
        self._peak_bytes = self._recent_peak_bytes = 0
        self._tally = self._new_tally()

    def has(self, memory: torch.Tensor | torch.UntypedStorage) -> bool:
        return memory.device == self.device

    @property
    def held_bytes(self) -> int:
        """Bytes that count now."""
        return self._before_bytes + self._tally.allocated_bytes()

    @abstractmethod
    def keep(self, free: Callable[[int], bool] | int) -> None:
        """Keep to the limit from now on.

        `free`: frees memory when the limit is reached; a function, or the address of one in C.
        """

    @abstractmethod
    def open(self) -> None:
        """Keep to no limit any more."""

    @abstractmethod
    def refusals(self) -> Refusals:
        """Return the size of the last refused request, and the bytes that were held then."""

    def in_room(self, attempt: Callable[[], Result]) -> Result:
        """Return a call's result; it runs again, if need be, where its requests are refused."""
        return attempt()

    def note_earlier_freed(self, size_bytes: int) -> None:
        """Note that a storage from before the region was freed."""
        self.peak_bytes()
        self._before_bytes -= size_bytes
        self._tally.set_limit(self.limit_bytes, self._before_bytes)

    def peak_bytes(self) -> int:
        """Return the most that counted at once so far."""
        now_bytes = self._before_bytes + self._tally.take_peak_bytes()
        self._peak_bytes = max(self._peak_bytes, now_bytes)
        self._recent_peak_bytes = max(self._recent_peak_bytes, now_bytes)
        return self._peak_bytes

    def take_recent_peak_bytes(self) -> int:
        """Return the most that counted at once since this was asked last."""
        self.peak_bytes()
        recent_bytes, self._recent_peak_bytes = self._recent_peak_bytes, 0
        return recent_bytes

    def _new_tally(self) -> CpuTally | CudaTally:
        return CpuTally()


class CallingRoom(Room):
    """A room whose allocator calls back to free memory, within the operator that asks."""

    _tally: CpuTally

    def keep(self, free: Callable[[int], bool] | int) -> None:
        self._tally.make_room_by(free)
        self._tally.set_limit(self.limit_bytes, self._before_bytes)

    def open(self) -> None:
        self._tally.set_limit(None, 0)
        self._tally.make_room_by(None)

    def refusals(self) -> Refusals:
        return self._tally.refusals()


class RetryingRoom(Room):
    """A room whose allocator refuses at once: the caller runs again after memory is freed.

    The way of a GPU, whose allocator has no callback. On the CPU it is for tests.
    """

    retries = True

    def __init__(self, limit_bytes: int, before_bytes: int, device: torch.device = _CPU) -> None:
        super().__init__(limit_bytes, before_bytes, device)
        self._free: Callable[[int], bool] | None = None
        self._refusals = Refusals()

    def keep(self, free: Callable[[int], bool] | int) -> None:
        assert callable(free)
        self._free = free
        self._tally.set_limit(self.limit_bytes, self._before_bytes)

    def open(self) -> None:
        self._tally.set_limit(None, 0)
        self._free = None

    def refusals(self) -> Refusals:
        return self._refusals

    def in_room(self, attempt: Callable[[], Result]) -> Result:
        """Return a call's result; evict and call again where its requests are refused."""
        while True:
            try:
                return attempt()
            except RuntimeError as error:
                if not is_refusal(error):
                    raise
                lacking_bytes = self.refused(error)
                traceback.clear_frames(error.__traceback__)  # they hold tensors of the attempt
                if self._free is None or not self._free(lacking_bytes):
                    raise

    def make(self, size_bytes: int) -> None:
        """Evict until so much would be allocated, as far as that goes."""
        unless_refused(lambda: self.in_room(lambda: new_memory(size_bytes, self.device)))

    def taken_by(self, run: Callable[[], Result]) -> tuple[Result, int]:
        """Return a call's result, and the most bytes that it has needed."""
        self.take_recent_peak_bytes()
        before_bytes = self.held_bytes
        result = run()
        return result, self.take_recent_peak_bytes() - before_bytes

    def refused(self, error: BaseException) -> int:
        """Note a request that a limit has refused; return the bytes to free.

        Where as much as was asked for is free already, it is fragmented, and does not count.
        """
        limit_bytes, asked_bytes, held_bytes = refused_bytes(error)
        self._refusals = Refusals(self._refusals.count + 1, asked_bytes, held_bytes)
        lacking_bytes = asked_bytes + held_bytes - limit_bytes
        return lacking_bytes if lacking_bytes > 0 else max(asked_bytes, 1)


class CudaRoom(RetryingRoom):
    """The room on a GPU, under PyTorch's own limit of bytes that its allocator reserves."""

    _tally: CudaTally

    def note_earlier_freed(self, size_bytes: int) -> None:
        """Do nothing: such memory is allocated no longer, and not counted."""

    def taken_by(self, run: Callable[[], Result]) -> tuple[Result, int]:
        """Return a call's result, and the bytes that it has asked for: peaks are the user's."""
        before_bytes = self._tally.asked_so_far_bytes()
        result = run()
        return result, self._tally.asked_so_far_bytes() - before_bytes

    def _new_tally(self) -> CudaTally:
        return CudaTally(self.device, (), restarts_peak=True)


def room_on(limit_bytes: int, before_bytes: int, device: torch.device) -> Room:
    kind = CudaRoom if device.type == "cuda" else CallingRoom
    return kind(limit_bytes, before_bytes, device)


def storages_alive(device: torch.device = _CPU) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors on a device that Python knows."""
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return [storage for storage in storages_of(alive(kinds)) if storage.device == device]


def allocated_bytes(storage: torch.UntypedStorage) -> int:
    """Return the bytes that the allocator has allocated for a storage."""
    return rounded_up(storage.nbytes(), granularity_of(storage.device.type))
