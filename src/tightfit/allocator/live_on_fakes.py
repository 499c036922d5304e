"""The memory that operators would take, predicted on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from tightfit.torch_private import core as private
from tightfit.units import rounded_up


@dataclass
class LiveOnFakes(private.TorchDispatchMode):
    """Counts the bytes of the storages that ops make, as long as a tensor refers to them."""

    granularity: int  # the unit that the device's allocator rounds to, in bytes
    peak_bytes: int = 0  # the most that lived at once so far
    _held_bytes: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)  # of storages, by their keys
    _tensors: Counter[int] = field(default_factory=Counter)  # how many refer to each
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
        if key in given and key not in self._sizes:
            return  # there before
        self._known_tensors[tensor] = True
        if key not in self._sizes:
            self._sizes[key] = rounded_up(storage.nbytes(), self.granularity)
            self._held_bytes += self._sizes[key]
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        self._tensors[key] += 1
        weakref.finalize(tensor, self._dropped, key)

    def _dropped(self, key: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            self._held_bytes -= self._sizes.pop(key)
