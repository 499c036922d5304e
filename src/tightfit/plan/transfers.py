"""When stores and loads begin and end, and how long a step waits for them.

Transfers queue one after the other in each direction. A step's ops run one after the other, too.
Where an op needs a value whose transfer has not ended, the step stalls.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tightfit.graph.ir import ValueId
from tightfit.plan.plan import Far

Direction: TypeAlias = Literal["store", "load"]


class Transfer(msgspec.Struct, frozen=True):
    """One value on its way."""

    value: ValueId  # the moved value
    direction: Direction  # ``"store"``: to far memory; ``"load"``: back
    size_bytes: int
    # begin_s, end_s: seconds since the start of the step
    begin_s: float
    end_s: float


class Link:
    """The link to far memory while a plan is replayed.

    `far`: None: nothing is moved.
    """

    def __init__(self, far: Far | None) -> None:
        self.far = far
        self.stall_s = 0.0
        self.transfers: list[Transfer] = []
        self._free_s: dict[Direction, float] = {"store": 0.0, "load": 0.0}
        self._ends_s: dict[ValueId, float] = {}  # of transfers that an op may have to wait for

    def begin(self, value: ValueId, size_bytes: int, direction: Direction, cost_s: float) -> None:
        """Queue a transfer, once ops of `cost_s` seconds have run."""
        assert self.far is not None
        took = self.far.store_s if direction == "store" else self.far.load_s
        begin_s = max(cost_s + self.stall_s, self._free_s[direction])
        end_s = begin_s + took(size_bytes)
        self._free_s[direction] = self._ends_s[value] = end_s
        self.transfers.append(Transfer(value, direction, size_bytes, begin_s, end_s))

    def wait(self, value: ValueId, cost_s: float) -> None:
        """Stall until the value's transfer has ended, if it is running."""
        self._until(self._ends_s.pop(value, 0.0), cost_s)

    def wait_for_all(self, cost_s: float) -> None:
        """Stall until no transfer is in flight."""
        self._until(max(self._free_s.values()), cost_s)

    def _until(self, end_s: float, cost_s: float) -> None:
        self.stall_s += max(0.0, end_s - (cost_s + self.stall_s))
