"""Report that a fitted model is trained without its plan: then only the limit holds the budget."""

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


class FittedCallable(Protocol):
    """A fitted forward or method of a model."""

    name: str
    on_exceed: Literal["raise", "warn"]

    @property
    def is_used(self) -> bool:
        """Whether a planned call has been run, or is to be."""

    @property
    def has_limit(self) -> bool:
        """Whether requests above its budget are refused."""


def report_bypass(model: nn.Module, fitted: Sequence[FittedCallable]) -> Callable[[], None]:
    """Report when the first gradient reaches a model before any of its fitted callables was called.

    Code that trains may call inner modules or other methods instead: their memory is not planned.
    Where requests above the budget are not refused either, that is an error.

    `fitted`: its forward, and the methods that were named. Returns a function that removes the
    hooks; the first gradient removes them, too.
    """
    handles: list[Any] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    references = [weakref.ref(each) for each in fitted]
    methods = own_methods(type(model))
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf:
            hook = _hook(references, name, methods, remove)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return remove


def _hook(
    references: list[weakref.ref[FittedCallable]],
    name: str,
    methods: list[str],
    remove: Callable[[], None],
) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        remove()
        if _uncalled(references) is not None:
            gc.collect()  # the model itself may be garbage
        fitted = _uncalled(references)
        if fitted is not None:
            _report(fitted, name, methods)

    return hook


def _uncalled(references: list[weakref.ref[FittedCallable]]) -> FittedCallable | None:
    """Return the first of some callables; None where any was called or is dead."""
    fitted = [reference() for reference in references]
    if any(each is None or each.is_used for each in fitted):
        return None
    return fitted[0]


def _report(fitted: FittedCallable, name: str, methods: list[str]) -> None:
    what = (
        f"a gradient reached {name!r} of a fitted {fitted.name} whose forward was not called: "
        "it is trained without its plan"
    )
    advice = f"{_methods_advice(methods)}{_FIT_ANOTHER}. {WITHOUT_A_PLAN}"
    if fitted.has_limit:
        announce(f"{what}. The limit holds, but nothing is computed again to keep to it. {advice}")
    elif fitted.on_exceed == "raise":
        raise BadInput(f"{what}, and nothing holds the budget. {advice}")
    else:
        warnings.warn(f"{what}, and nothing holds the budget. {advice}", stacklevel=3)


def _methods_advice(methods: list[str]) -> str:
    if not methods:
        return ""
    return (
        "If the training calls other methods of it, name them: "
        f"tightfit.fit(model, budget, methods={methods[:_MOST_NAMED]}). "
    )
