"""The interface of both runtimes of a region (Python and C++), and the code they share.

Parameters are known and their gradients stay, an optimizer's step ends a training step, and errors
have the same words.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tightfit.dynamic.contents import tensors_in
from tightfit.dynamic.room import Room
from tightfit.errors import BudgetExceeded
from tightfit.units import format_bytes


class Core(ABC):
    """Sees every operator from its beginning to its end, and keeps to the room there is."""

    name: str
    """How reports call it."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room
        self._parameters: dict[int, tuple[weakref.ref[Any], Any]] = {}

    # -- the work of a runtime ---------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """See the operators of this thread from now on."""

    @abstractmethod
    def end(self) -> None:
        """Stop seeing operators."""

    @abstractmethod
    def know(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Note storages that exist before the region."""

    @property
    @abstractmethod
    def room_maker(self) -> Callable[[int], bool] | int:
        """The function that the allocator calls for room, or the address of a function in C."""

    @abstractmethod
    def make_room(self, lacking_bytes: int) -> bool:
        """Evict; return whether anything was freed."""

    @abstractmethod
    def need(self, tensor: torch.Tensor, is_permanent: bool) -> None:
        """Bring a tensor back that is read without the dispatcher; it may have to stay there."""

    @abstractmethod
    def resize(self, storage: torch.UntypedStorage, run: Callable[[], Any]) -> Any:
        """Resize a storage; contents computed from it must not need its old content any more."""

    @abstractmethod
    def expect_writes(self, size_bytes: int) -> None:
        """Note how many bytes an optimizer is about to overwrite; 0: none any more."""

    @abstractmethod
    def end_step(self) -> None:
        """Note the end of a training step."""

    @abstractmethod
    def settle_all(self) -> int:
        """Bring back everything the program holds, to leave; return the bytes that do not fit."""

    @abstractmethod
    def clean_up_failed_backward(self) -> None:
        """Free autograd's tensors of a backward in which an operator has failed."""

    @abstractmethod
    def close(self) -> None:
        """Forget everything."""

    @abstractmethod
    def update_ledger(self) -> None:
        """Write events so far into the ledger."""

    @abstractmethod
    def weights(self) -> tuple[int, int]:
        """Return the resident bytes that stay for ever, and the other resident bytes."""

    @property
    @abstractmethod
    def refused(self) -> str:
        """The operator that could not run again, if that was why something failed."""

    # -- parameters and steps ----------------------------------------------------------------------

    def watches(self, parameter: torch.Tensor) -> bool:
        known = self._parameters.get(id(parameter))
        return known is not None and known[0]() is parameter

    def watch(self, parameter: torch.Tensor) -> None:
        """Let the gradients of a parameter stay as soon as they are accumulated."""
        hook = None
        if parameter.requires_grad and parameter.is_leaf:
            hook = parameter.register_post_accumulate_grad_hook(self.settle_gradient)
        self._parameters[id(parameter)] = weakref.ref(parameter), hook

    def stop_watching(self) -> None:
        for _, hook in self._parameters.values():
            if hook is not None:
                hook.remove()
        self._parameters.clear()

    def settle_gradient(self, parameter: torch.Tensor) -> None:
        """Keep an accumulated gradient; contents it was computed from may be evicted."""
        if parameter.grad is not None:
            self.need(parameter.grad, is_permanent=True)

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep gradients, however they came about; all parameters are about to change."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            self.settle_gradient(parameter)
        self.expect_writes(sum(p.numel() * p.element_size() for p in parameters))

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the optimizer's state, and end the step."""
        self.expect_writes(0)
        for state in optimizer.state.values():
            for tensor in tensors_in([*state.values()]):
                self.need(tensor, is_permanent=True)
        self.end_step()

    def exceeded(self, name: str, *, has_begun: bool = False) -> BudgetExceeded:
        """Return the error of an operator that cannot fit.

        `has_begun`: whether it may have begun to write into its arguments.
        """
        room = self._room
        last = room.refusals()
        asked_bytes, held_bytes = last.asked_bytes, last.held_bytes
        again = self.refused
        operator = f"{name} (for which {again} runs again)" if again else name
        kept_bytes, needed_bytes = self.weights()
        own_bytes = held_bytes - kept_bytes - needed_bytes
        own = f"; {format_bytes(own_bytes)} it had taken itself by then" if own_bytes > 0 else ""
        state = (
            "it reads tensors that it overwrites and may have begun, so it does not run again: "
            "they may have changed, and room is made before it the next time"
            if has_begun
            else "parameters and the optimizer's state are as they were"
        )
        return BudgetExceeded(
            f"{operator} needs {format_bytes(asked_bytes)} more, but {format_bytes(held_bytes)} of "
            f"the budget of {format_bytes(room.limit_bytes)} are held and nothing more can be "
            f"evicted. {format_bytes(kept_bytes)} are parameters, inputs, gradients and other "
            f"tensors that cannot be computed again. {format_bytes(needed_bytes)} are read by the "
            f"operator and those that wait for it, or are too small to evict{own}. Raise the "
            f"budget or make the batch smaller; {state}",
            budget_bytes=room.limit_bytes,
            measured_bytes=held_bytes + asked_bytes,
        )
