"""Tensors a forward uses that belong to nobody: globals, caches, plain attributes of modules.

While a step is traced they are replaced by buffers that stand for them, so that every step reads
what they hold then, and writes to them as the forward does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = ["PREFIX", "AllFound", "OutsideTensors"]

PREFIX = "_outside"
"""The name under which a traced step knows the module that holds them."""


class AllFound(CaptureError):
    """A forward was traced to its end only to find the outside tensors that it uses."""


class OutsideTensors(TorchFunctionMode):
    """Puts what stands for outside tensors in their place; notes those that nothing stands for.

    Parameters
    ----------
    known : sequence of tensor
        Those that buffers stand for.
    collects : bool
        Whether a trace goes on where it meets others, to its forward's end: it is no plan's.
    """

    def __init__(self, known: Sequence[torch.Tensor], *, collects: bool = False) -> None:
        super().__init__()
        self.collects = collects
        self._known = tuple(known)
        self._instead: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}
        self.found: dict[int, torch.Tensor] = {}
        self.holder = nn.Module()
        for number, tensor in enumerate(known):
            self.holder.register_buffer(f"tensor{number}", tensor)

    def __len__(self) -> int:
        return len(self._known)

    def __bool__(self) -> bool:
        return True

    @property
    def numbers(self) -> dict[int, int]:
        """The numbers of the known ones, by their ids."""
        return {id(tensor): number for number, tensor in enumerate(self._known)}

    def take(self, number: int, tensor: torch.Tensor) -> None:
        """Put another tensor like it in place of a known one: it lies there now."""
        if tensor is not self._known[number]:
            self._known = (*self._known[:number], tensor, *self._known[number + 1 :])
            self.holder.register_buffer(f"tensor{number}", tensor)

    def collecting(self) -> OutsideTensors:
        """Return one that knows the same, for a trace that finds all others."""
        return OutsideTensors(self._known, collects=True)

    def with_found(self) -> OutsideTensors:
        """Return one that knows also those which nothing stood for."""
        return OutsideTensors((*self._known, *self.found.values()))

    def start(self, holder: nn.Module) -> None:
        """Begin anew, with what the tracer put in place of the holder's buffers."""
        self._made = {}
        self._instead = {id(t): b for t, b in zip(self._known, holder.buffers(), strict=True)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not private.is_tracing():
            return func(*args, **kwargs)
        args, kwargs = private.pytree.tree_map_only(torch.Tensor, self._replaced, (args, kwargs))
        result = func(*args, **kwargs)
        for tensor in private.pytree.tree_leaves(result):
            if type(tensor) is torch.Tensor:  # made of outside ones that nothing stands for yet
                self._made[id(tensor)] = tensor
        return result

    def _replaced(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.requires_grad:
            return tensor
        instead = self._instead.get(id(tensor))
        if instead is None and id(tensor) not in self._made:
            self.found[id(tensor)] = tensor
            if self.collects:
                instead = self._instead[id(tensor)] = private.traced_twin(tensor)
        return tensor if instead is None else instead
