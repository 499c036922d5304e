"""A step under way with values near and far, and transfers that still take time."""

from __future__ import annotations

from typing import NamedTuple

from tightfit.plan import Far

Waits = tuple[tuple[int, float], ...]


class LinkState(NamedTuple):
    """What is where. Transfers queue one after the other in each direction."""

    done: int = 0  # computations that were first made
    alive: frozenset[int] = frozenset()  # values near
    stored: frozenset[int] = frozenset()
    storing: Waits = ()  # value, seconds until its store has ended
    coming: Waits = ()
    stores_s: float = 0.0  # until the queue is empty
    loads_s: float = 0.0

    def later(self, seconds: float) -> LinkState:
        """Return the state after some seconds."""

        def left(waits: Waits) -> Waits:
            return tuple((v, s - seconds) for v, s in waits if s > seconds)

        return self._replace(
            storing=left(self.storing),
            coming=left(self.coming),
            stores_s=max(0.0, self.stores_s - seconds),
            loads_s=max(0.0, self.loads_s - seconds),
        )

    def with_store(self, value: int, size_bytes: int, far: Far) -> LinkState:
        """Return the state once a store has begun."""
        end = self.stores_s + far.store_s(size_bytes)
        storing = (*self.storing, (value, end))
        return self._replace(stored=self.stored | {value}, storing=storing, stores_s=end)

    def with_load(self, value: int, size_bytes: int, far: Far) -> LinkState:
        """Return the state once a load has begun."""
        end = self.loads_s + far.load_s(size_bytes)
        coming = (*self.coming, (value, end))
        return self._replace(alive=self.alive | {value}, coming=coming, loads_s=end)

    def without(self, value: int) -> tuple[float, LinkState]:
        """Return how long a transfer of a value holds it near, and the state without it."""
        wait = dict((*self.storing, *self.coming)).get(value, 0.0)
        after = self.later(wait)
        return wait, after._replace(alive=after.alive - {value})
