"""Notice when a fitted model is trained around its plan: then nothing holds the budget."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tightfit.errors import WITHOUT_A_PLAN, BadInput

__all__ = ["expect_calls"]


class Expecting(Protocol):
    """A fitted model whose forward is to be called."""

    name: str
    on_exceed: Literal["raise", "warn"]

    @property
    def is_used(self) -> bool:
        """Whether a planned call has been run, or is to be."""
        ...


def expect_calls(model: nn.Module, expecting: Expecting) -> Callable[[], None]:
    """Complain when the first gradients reach a fitted model whose forward was never called.

    Code that trains may call inner modules or other methods instead: a plan sees nothing of that.

    Returns
    -------
    callable
        Takes away what watches for it, which also goes with the first gradients.
    """
    handles: list[Any] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf:
            arrived = _arrival(weakref.ref(expecting), name, remove)
            handles.append(parameter.register_post_accumulate_grad_hook(arrived))
    return remove


def _arrival(
    reference: weakref.ref[Expecting], name: str, remove: Callable[[], None]
) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        remove()
        if _still_expecting(reference) is not None:
            gc.collect()  # a model that was let go of expects nothing
        expecting = _still_expecting(reference)
        if expecting is not None:
            _complain(expecting, name)

    return arrived


def _still_expecting(reference: weakref.ref[Expecting]) -> Expecting | None:
    """Return what awaits its first call; None for others and those let go of."""
    expecting = reference()
    return None if expecting is None or expecting.is_used else expecting


def _complain(expecting: Expecting, name: str) -> None:
    message = (
        f"a gradient reached {name!r} of a fitted {expecting.name} whose forward was not called: "
        "it is trained around its plan, and nothing holds the budget. Fit the module that the "
        "training calls (in Lightning: the one inside, if training_step calls that), or the "
        f"function that computes the loss, with tightfit.step. {WITHOUT_A_PLAN}"
    )
    if expecting.on_exceed == "raise":
        raise BadInput(message)
    warnings.warn(message, stacklevel=3)
