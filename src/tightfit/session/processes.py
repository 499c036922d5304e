"""Processes that train one model together find things out once: costs, plans, what user code holds.

They meet in the key-value store that `torch.distributed` started with, not in collectives: a rank
that needs something nobody has made yet makes it, every other rank that needs the same waits for
it. So ranks may see different shapes, or in another order, and nobody waits for a rank that has no
reason to come.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec

from tightfit.errors import TightfitError
from tightfit.torch_private import core as private

__all__ = ["Ranks", "agreed"]

Found = TypeVar("Found")

_PATIENCE_S = 1800
_LONGEST_PAUSE_S = 0.1
_MADE, _FAILED = b"+", b"-"


class Ranks:
    """The processes of one group, seen from one of them.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Those that train the model. Every rank makes the same `Ranks` in the same order.
    """

    _made: ClassVar[Counter[str]] = Counter()

    def __init__(self, group: Any) -> None:
        self.store = private.store_of_processes()
        self.rank, self.size = group.rank(), group.size()
        name = group.group_name
        self._prefix = f"tightfit/{name}/{self._made[name]}"
        self._made[name] += 1

    def once(self, key: str, kind: type[Found], make: Callable[[], Found]) -> Found:
        """Return what the first rank to ask for a key makes; the others wait for it.

        Should making it fail there, every rank tries for itself.

        Parameters
        ----------
        key : str
            Says what is made, and from what.
        kind : type
            The type of what is made, as msgspec knows types.
        make : callable
            Makes it.
        """
        place = f"{self._prefix}/{key}"
        if self.store.add(f"{place}/asked", 1) > 1:
            content = self._wait_for(place)
            return (
                msgspec.msgpack.decode(content[1:], type=kind) if content[:1] == _MADE else make()
            )
        content = _FAILED
        try:
            found = make()
            content = _MADE + msgspec.msgpack.encode(found)
        finally:
            self.store.set(place, content)
        return found

    def gather(self, key: str, own: int) -> list[int]:
        """Return every rank's number under a key; all ranks have to ask for it."""
        place = f"{self._prefix}/{key}"
        self.store.set(f"{place}/{self.rank}", str(own))
        return [int(self._wait_for(f"{place}/{rank}")) for rank in range(self.size)]

    def _wait_for(self, place: str) -> bytes:
        """Return what lies under a key; looked for again and again, as waiting locks the store."""
        deadline = time.monotonic() + _PATIENCE_S
        pause_s = 0.001
        while not self.store.check([place]):
            if time.monotonic() > deadline:
                raise TightfitError(
                    f"rank {self.rank} waited {_PATIENCE_S // 60} minutes for what another rank "
                    f"was to find out ({place}): it has failed, or it does not train this model. "
                    "See what the other ranks report"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self.store.get(place)


def agreed(ranks: Ranks | None, key: str, kind: type[Found], make: Callable[[], Found]) -> Found:
    """Return what is made under a key: by one of the ranks, or here if there are no others."""
    return make() if ranks is None else ranks.once(key, kind, make)
