"""The allocated bytes of tensors: distinct storages, rounded as a device rounds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tightfit.torch_private import core as private
from tightfit.torch_private import tools
from tightfit.torch_private.storages import in_use, is_used_beyond
from tightfit.units import rounded_up

_GRANULARITY = {"cpu": 64, "cuda": 512}


def granularity_of(kind: str) -> int:
    """Return the bytes that the allocator of a kind of device rounds sizes up to."""
    return _GRANULARITY.get(kind, 512)


def resident_tensor_bytes(
    tensors: Iterable[Any], granularity: int, without: Iterable[Any] = ()
) -> int:
    """Return the bytes of the distinct storages of tensors, rounded as the allocator rounds.

    Of a tensor that is spread over processes the local part counts. `without`: tensors whose
    storages do not count.
    """
    left_out = {storage._cdata for storage in _each_storage(without)}
    counted = (s for s in storages_of(tensors) if s._cdata not in left_out)
    return sum(rounded_up(storage.nbytes(), granularity) for storage in counted)


def storages_of(tensors: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Return the distinct storages of tensors; other objects are passed over."""
    return list({storage._cdata: storage for storage in _each_storage(tensors)}.values())


def hold_alone(tensors: Iterable[Any]) -> bool:
    """Whether there is a storage that nothing else than these tensors uses."""
    storages = list(_each_storage(tensors))
    uses = Counter(storage._cdata for storage in storages)
    return any(not is_used_beyond(storage, uses[storage._cdata]) for storage in storages)


def _each_storage(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for tensor in map(tools.local_tensor, tensors):
        if isinstance(tensor, torch.Tensor):
            yield from (part.untyped_storage() for part in _strided_parts(tensor))


class FirstStorages:
    """The storages of some tensors, as long as anything uses them.

    No weak reference is held to a tensor itself: `torch.utils.swap_tensors` refuses such a tensor.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._of = {id(t): [*map(StorageWeakRef, storages_of([t]))] for t in tensors}

    def others(self, tensors: Iterable[Any]) -> list[torch.Tensor]:
        """Return tensors of the storages in use, without storages of given tensors."""
        given = set(map(id, tensors))
        rest = (known for key, held in self._of.items() if key not in given for known in held)
        storages = (storage for storage in map(in_use, rest) if storage is not None)
        return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages]


def element_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the elements of tensors, each by itself; other objects have none."""
    own = (x for x in tensors if isinstance(x, torch.Tensor))
    return sum(part.nbytes for x in own for part in _strided_parts(x))


def is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor has but a part of the memory that it keeps: a slice of a data set, say."""
    return element_bytes([tensor]) < sum(s.nbytes() for s in storages_of([tensor]))


def _strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with a tensor's numbers: itself, or indices and values if it is sparse.

    Nothing for a tensor without memory.
    """
    if not private.has_memory(tensor):
        return ()
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,) if tensor.layout == torch.strided else ()
