"""What follows the Python of what is fitted: Dynamo, or the tracer if the environment says so."""

from __future__ import annotations

import os

import torch

from tightfit.errors import BadInput
from tightfit.torch_private import dynamo as private

__all__ = ["goes_through_dynamo"]

_VARIABLE = "TIGHTFIT_FRONT"
_FRONTS = ("python", "dynamo")


def goes_through_dynamo() -> bool:
    """Whether Dynamo follows the Python of callables, or else the tracer does.

    The tracer does in a PyTorch that lacks what is needed of Dynamo.

    Raises
    ------
    BadInput
        If the environment says neither, or asks for Dynamo in such a PyTorch.
    """
    front = os.environ.get(_VARIABLE) or ("dynamo" if private.follows_in_place() else "python")
    if front not in _FRONTS:
        raise BadInput(f"{_VARIABLE} is {front!r}; it may be {' or '.join(_FRONTS)}")
    if front == "dynamo" and not private.follows_in_place():
        raise BadInput(
            f"{_VARIABLE}=dynamo needs PyTorch 2.13, here is {torch.__version__}: leave it out"
        )
    return front == "dynamo"
