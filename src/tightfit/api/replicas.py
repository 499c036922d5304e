"""A fitted module inside DistributedDataParallel: its buckets, and ranks that share one plan."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from tightfit.errors import BadInput
from tightfit.session.memory.account import resident_tensor_bytes
from tightfit.session.processes import Ranks
from tightfit.torch_private import core as private

__all__ = ["Replicas", "running_wrapper"]


def running_wrapper() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward is under way, if there is one."""
    return private.active_wrapper()


class Replicas:
    """What DistributedDataParallel means for the plan of the module inside.

    Its buckets hold every trained parameter's gradient once more, from the wrapping on. With
    ``gradient_as_bucket_view`` a gradient is copied into its bucket as soon as it is handed over,
    and freed.

    Parameters
    ----------
    wrapper : DistributedDataParallel
        Around the fitted module, or around a module it is part of.

    Raises
    ------
    BadInput
        If the wrapper keeps copies of the parameters in another precision.
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
        """Whether this was made for a wrapper."""
        return self._wrapper() is wrapper

    def bucket_bytes(self, granularity: int) -> int:
        """Return the bytes of the buckets that are not the gradients' own storage already.

        One unit of the allocator for each parameter is added: what the wrapper notes about it.
        """
        if self._wrapper() is None:
            return 0
        every = sum((-(-p.nbytes // granularity) + 1) * granularity for p in self._reduced.values())
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
            and running_wrapper() is wrapper
            and wrapper.gradient_as_bucket_view
            and wrapper.require_backward_grad_sync
            and not private.reduces_after_backward(wrapper)
            and all(id(owner) in self._reduced for owner in owners)
        )
