"""Notice when a fitted model is trained around its plan: then only the limit holds the budget."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tightfit.errors import WITHOUT_A_PLAN, BadInput
from tightfit.execution.attach import own_methods
from tightfit.progress import announce

_MOST_NAMED = 6
_FIT_ANOTHER = (
    "Fit the module that the training calls (in Lightning: the inner module, if training_step "
    "calls that), or the function that computes the loss, with tightfit.step"
)


class Expecting(Protocol):
    """A fitted model whose forward is to be called."""

    name: str
    on_exceed: Literal["raise", "warn"]

    @property
    def is_used(self) -> bool:
        """Whether a planned call has been run, or is to be."""

    @property
    def has_limit(self) -> bool:
        """Whether requests above its budget are refused."""


def expect_calls(model: nn.Module, expecting: Sequence[Expecting]) -> Callable[[], None]:
    """Tell when the first gradients reach a fitted model of which nothing fitted was called.

    Code that trains may call inner modules or other methods instead: a plan sees nothing of that.
    Where the budget is no limit either, that is an error.

    `expecting`: callables that run its forward, and its methods that were named. Returns a function
    that ends the watching; the first gradients end it, too.
    """
    handles: list[Any] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    references = [weakref.ref(awaited) for awaited in expecting]
    methods = own_methods(type(model))
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf:
            arrived = _arrival(references, name, methods, remove)
            handles.append(parameter.register_post_accumulate_grad_hook(arrived))
    return remove


def _arrival(
    references: list[weakref.ref[Expecting]],
    name: str,
    methods: list[str],
    remove: Callable[[], None],
) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        remove()
        if _still_expecting(references) is not None:
            gc.collect()  # a model that is no longer alive expects nothing
        expecting = _still_expecting(references)
        if expecting is not None:
            _tell_uncalled(expecting, name, methods)

    return arrived


def _still_expecting(references: list[weakref.ref[Expecting]]) -> Expecting | None:
    """Return callables that await their first call; None where any was called or is dead."""
    expecting = [reference() for reference in references]
    if any(awaited is None or awaited.is_used for awaited in expecting):
        return None
    return expecting[0]


def _tell_uncalled(expecting: Expecting, name: str, methods: list[str]) -> None:
    what = (
        f"a gradient reached {name!r} of a fitted {expecting.name} whose forward was not called: "
        "it is trained around its plan"
    )
    ways = f"{_naming(methods)}{_FIT_ANOTHER}. {WITHOUT_A_PLAN}"
    if expecting.has_limit:
        announce(f"{what}. The limit holds, but nothing is computed again to keep to it. {ways}")
    elif expecting.on_exceed == "raise":
        raise BadInput(f"{what}, and nothing holds the budget. {ways}")
    else:
        warnings.warn(f"{what}, and nothing holds the budget. {ways}", stacklevel=3)


def _naming(methods: list[str]) -> str:
    if not methods:
        return ""
    return (
        "If the training calls other methods of it, name them: "
        f"tightfit.fit(model, budget, methods={methods[:_MOST_NAMED]}). "
    )
