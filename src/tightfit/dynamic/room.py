"""The limit of a region, kept inside the allocator: operators' workspace counts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tightfit.allocator.alive import alive
from tightfit.allocator.refusals import budget_exceeded, is_refusal
from tightfit.allocator.resident import granularity_of, storages_of
from tightfit.allocator.tally import CpuTally, Refusals
from tightfit.units import rounded_up

__all__ = ["Room", "allocated_bytes", "budget_exceeded", "is_refusal", "storages_alive"]


class Room:
    """What is given out on the CPU, what was there before, and the limit of both.

    Parameters
    ----------
    limit_bytes : int
        The limit.
    before_bytes : int
        What is there already.

    Raises
    ------
    HookUnavailable
        If the allocator hook cannot be installed.
    """

    def __init__(self, limit_bytes: int, before_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._tally = CpuTally()
        self._before_bytes = before_bytes
        self._peak_bytes = self._recent_peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What counts now."""
        return self._before_bytes + self._tally.given_bytes()

    def refusals(self) -> Refusals:
        """Return what the last request that was refused had asked for, and what was held then."""
        return self._tally.refusals()

    def keep(self, free: Callable[[int], bool] | int) -> None:
        """Keep to the limit from now on; a function frees something when it is reached.

        Parameters
        ----------
        free : callable or int
            The function, or the address of one in C.
        """
        self._tally.make_room_by(free)
        self._tally.keep_to(self.limit_bytes, self._before_bytes)

    def open(self) -> None:
        """Keep to no limit any more."""
        self._tally.keep_to(None, 0)
        self._tally.make_room_by(None)

    def less_before(self, size_bytes: int) -> None:
        """Something that was there before has ended."""
        self.peak_bytes()
        self._before_bytes -= size_bytes
        self._tally.keep_to(self.limit_bytes, self._before_bytes)

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


def storages_alive() -> list[torch.UntypedStorage]:
    """Return the storages of all tensors on the CPU that Python knows."""
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return [storage for storage in storages_of(alive(kinds)) if storage.device.type == "cpu"]


def allocated_bytes(storage: torch.UntypedStorage) -> int:
    """Return what the allocator has given out for a storage."""
    return rounded_up(storage.nbytes(), granularity_of("cpu"))
