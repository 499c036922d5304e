"""Processes that train the same model share results: costs, plans, memory of user code.

They share them through the key-value store of `torch.distributed`, not by collectives. The first
rank that needs a result makes it, and others that need the same wait for it. So ranks may see
different shapes, or in another order, and no rank waits for a result that no other rank needs.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import msgspec
from torch.nn.parallel import DistributedDataParallel

from tightfit.allocator.resident import resident_tensor_bytes
from tightfit.errors import BadInput, TightfitError
from tightfit.torch_private import tools
from tightfit.units import rounded_up

Found = TypeVar("Found")

_PATIENCE_S = 1800
_LONGEST_PAUSE_S = 0.1
_MADE, _FAILED = b"+", b"-"


class Ranks:
    """The processes of a group, as one of them. All of them make the same `Ranks` in one order."""

    _made: ClassVar[Counter[str]] = Counter()

    def __init__(self, group: Any) -> None:
        self.store = tools.store_of_processes()
        self.rank, self.size = group.rank(), group.size()
        name = group.group_name
        self._prefix = f"tightfit/{name}/{self._made[name]}"
        self._made[name] += 1

    def once(self, key: str, kind: type[Found], make: Callable[[], Found]) -> Found:
        """Return a value made by the first rank to ask for a key; the others wait for it.

        If making it fails there, every rank makes it for itself.
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
        """Return the numbers of all ranks under a key; all of them have to call this."""
        place = f"{self._prefix}/{key}"
        self.store.set(f"{place}/{self.rank}", str(own))
        return [int(self._wait_for(f"{place}/{rank}")) for rank in range(self.size)]

    def _wait_for(self, place: str) -> bytes:
        """Return the value of a key; by polling, as waiting locks the store."""
        deadline = time.monotonic() + _PATIENCE_S
        pause_s = 0.001
        while not self.store.check([place]):
            if time.monotonic() > deadline:
                raise TightfitError(
                    f"rank {self.rank} waited {_PATIENCE_S // 60} minutes for a result of another "
                    f"rank ({place}): it has failed, or does not train this model. See the reports "
                    "of the other ranks"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self.store.get(place)


def agreed(ranks: Ranks | None, key: str, kind: type[Found], make: Callable[[], Found]) -> Found:
    """Return `Ranks.once`, or a value that is made here if there are no ranks."""
    return make() if ranks is None else ranks.once(key, kind, make)


class Replicas:
    """The buckets of DistributedDataParallel around a fitted module, or around its parent.

    They hold every trained parameter's gradient once more. With ``gradient_as_bucket_view`` a
    gradient is copied into its bucket as soon as it is handed over, and freed.

    Raises `BadInput` if the wrapper keeps copies of the parameters in another precision.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        if wrapper.mixed_precision is not None:
            raise BadInput(
                "DistributedDataParallel(mixed_precision=...) keeps second copies of all "
                "parameters, which no plan counts. Use torch.autocast, or weights in bfloat16"
            )
        self._wrapper = weakref.ref(wrapper)
        self.ranks = Ranks(wrapper.process_group)
        ignored = set(wrapper.parameters_to_ignore)
        self._reduced = {
            id(p): p
            for name, p in wrapper.module.named_parameters()
            if p.requires_grad and name not in ignored
        }

    def is_of(self, wrapper: DistributedDataParallel) -> bool:
        return self._wrapper() is wrapper

    def bucket_bytes(self, granularity: int) -> int:
        """Return the bytes of the buckets that no gradient is a view of.

        One unit of the allocator is added for the wrapper's records of each parameter.
        """
        if self._wrapper() is None:
            return 0
        every = sum(rounded_up(p.nbytes, granularity) + granularity for p in self._reduced.values())
        return max(0, every - self.viewed_bytes(granularity))

    def viewed_bytes(self, granularity: int) -> int:
        """Return the bytes of the buckets that gradients are views of."""
        wrapper = self._wrapper()
        if wrapper is None or not wrapper.gradient_as_bucket_view:
            return 0
        views = [p.grad for p in self._reduced.values() if p.grad is not None and p.grad._is_view()]
        return resident_tensor_bytes(views, granularity)

    def takes(self, owners: Iterable[Any]) -> bool:
        """Whether the gradients of all these parameters go into buckets during backward."""
        wrapper = self._wrapper()
        return (
            wrapper is not None
            and tools.active_wrapper() is wrapper
            and wrapper.gradient_as_bucket_view
            and wrapper.require_backward_grad_sync
            and not tools.reduces_after_backward(wrapper)
            and all(id(owner) in self._reduced for owner in owners)
        )
