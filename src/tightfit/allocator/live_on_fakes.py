"""The memory that operators would take, predicted on fake tensors."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from tightfit.torch_private import core as private
from tightfit.units import rounded_up


@dataclass
class _Storage:
    """A storage and how many tensors refer to it."""

    size_bytes: int
    tensors: int = 0

    def take(self) -> None:
        """Note one more tensor."""
        self.tensors += 1

    def drop(self) -> bool:
        """Note one tensor less; return whether it was the last."""
        self.tensors -= 1
        return not self.tensors


@dataclass
class LiveOnFakes(private.TorchDispatchMode):
    """Counts the bytes of the storages that ops make, as long as a tensor refers to them."""

    granularity: int  # the unit that the device's allocator rounds to, in bytes
    peak_bytes: int = 0  # the most that lived at once so far
    _held_bytes: int = 0
    _storages: dict[int, _Storage] = field(default_factory=dict)
    _known_tensors: Any = field(default_factory=private.WeakTensorKeyDictionary)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is private.ITEM:  # any number will do
            return 0.5 if args[0].is_floating_point() else 1
        leaves = private.pytree.tree_leaves((args, kwargs))
        given = {private.storage_key(x) for x in leaves if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in private.pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf not in self._known_tensors:
                self._count(leaf, given)
        return result

    def _count(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = private.storage_key(tensor)
        if key in given and key not in self._storages:
            return  # there before
        self._known_tensors[tensor] = True
        held = self._storages.get(key)
        if held is None:
            held = self._storages[key] = _Storage(rounded_up(storage.nbytes(), self.granularity))
            self._held_bytes += held.size_bytes
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        held.take()
        weakref.finalize(tensor, self._dropped, key)

    def _dropped(self, key: int) -> None:
        held = self._storages[key]
        if held.drop():
            self._held_bytes -= held.size_bytes
            del self._storages[key]
