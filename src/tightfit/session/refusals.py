"""The errors of a fitted callable, with the ways out."""

from __future__ import annotations

import torch

from tightfit.errors import (
    WITHOUT_A_PLAN,
    BudgetExceeded,
    CaptureError,
    NothingToTrain,
    PlanMismatch,
    SecondForward,
    TightfitError,
    with_another_way,
)


def with_way_out(refusal: TightfitError, device: torch.device) -> TightfitError:
    """Return a refusal that names `tightfit.online`, too, where that accepts the program."""
    if device.type != "cpu" or isinstance(refusal, NothingToTrain):
        return refusal
    if isinstance(refusal, BudgetExceeded | CaptureError | PlanMismatch | SecondForward):
        return with_another_way(refusal, WITHOUT_A_PLAN)
    return refusal


def second_forward(name: str, waiting: int) -> SecondForward:
    """Return the error of a call while so many before it await their backward."""
    return SecondForward(
        f"{name} was called again while {waiting} earlier planned call(s) await their backward: "
        "each would keep its activations and the budget would not hold. Call backward first, put "
        f"all into one function for tightfit.step, or allow it by in_flight={waiting + 1} (calls "
        "share the budget). If no backward is to come: torch.no_grad(), or free the outputs "
        "(del loss)"
    )
