"""Notice when a fitted model is trained around its plan: then nothing holds the budget."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tightfit.errors import BadInput
from tightfit.session.whole.steps import Session

__all__ = ["expect_calls"]


def expect_calls(session: Session) -> None:
    """Complain when the first gradients reach a fitted model whose forward was never called.

    Code that trains may call inner modules or other methods instead: a plan sees nothing of that.
    What watches for it goes with the first gradients, or when the session leaves the model.
    """
    handles: list[Any] = []
    for name, parameter in session.modules["model"].named_parameters():
        if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf:
            arrived = _arrival(weakref.ref(session), name, handles)
            handles.append(parameter.register_post_accumulate_grad_hook(arrived))
    session.at_leaving(functools.partial(_remove, handles))


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _arrival(
    session: weakref.ref[Session], name: str, handles: list[Any]
) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        _remove(handles)
        if _expecting(session) is not None:
            gc.collect()  # a model that was let go of expects nothing
        expecting = _expecting(session)
        if expecting is not None:
            _complain(expecting, name)

    return arrived


def _expecting(session: weakref.ref[Session]) -> Session | None:
    """Return a session that awaits its first call; None for others and those let go of."""
    expecting = session()
    return None if expecting is None or expecting.is_used else expecting


def _complain(session: Session, name: str) -> None:
    message = (
        f"a gradient reached {name!r} of a fitted {session.name} whose forward was not called: it "
        "is trained around its plan, and nothing holds the budget. Fit the module that the "
        "training calls (in Lightning: the one inside, if training_step calls that), or the "
        "function that computes the loss, with tightfit.step"
    )
    if session.options.on_exceed == "raise":
        raise BadInput(message)
    warnings.warn(message, stacklevel=3)
