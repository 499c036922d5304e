"""A caching allocator that loses a given share between blocks, over the CPU's own."""

from __future__ import annotations

from tightfit.allocator import CpuMeter
from tightfit.allocator.caching import AllocatorState
from tightfit.session.memory.account import Account


class Fragmenting:
    """Whatever is allocated, it has reserved more: by a share of the most that came since it began.

    What is reserved stays so. Where that would be more than the limit, it gives back what is
    cached and tries again: then only what is allocated is reserved.

    Parameters
    ----------
    share : float
        What is lost, of what is allocated.
    limit_bytes : int or None
        Of the device; None: there is none.

    Attributes
    ----------
    most_bytes : int
        That were reserved at one time.
    returned : int
        How often what was cached was given back on demand.
    """

    page_bytes = 0

    def __init__(self, account: Account, share: float, limit_bytes: int | None) -> None:
        self.share, self.limit_bytes = share, limit_bytes
        self.retries = self.returned = self.most_bytes = 0
        self._meter = CpuMeter()
        self._own = self._reserved = account.lasting_bytes()
        self._base = self._own - self._meter.live_bytes()

    def state(self) -> AllocatorState:
        peak = self._base + self._meter.peak_bytes()
        self._meter.reset_peak()
        live = self._base + self._meter.live_bytes()
        wanted = max(self._reserved, self._own + round((1 + self.share) * (peak - self._own)))
        if self.limit_bytes is not None and wanted > self.limit_bytes:
            assert peak <= self.limit_bytes, "out of memory"
            self.retries += 1
            wanted = peak
        self._reserved = wanted
        self.most_bytes = max(self.most_bytes, wanted)
        return AllocatorState(live, wanted, self.retries)

    def return_cached(self) -> None:
        self.returned += 1
        self.state()
        self._reserved = self._base + self._meter.live_bytes()
