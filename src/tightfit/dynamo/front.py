"""What follows the Python of what is fitted; the environment says it."""

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

    Raises
    ------
    BadInput
        If the environment says neither, or this PyTorch is too old.
    """
    front = os.environ.get(_VARIABLE, "python")
    if front not in _FRONTS:
        raise BadInput(f"{_VARIABLE} is {front!r}; it may be {' or '.join(_FRONTS)}")
    if front == "dynamo" and not private.follows_in_place():
        raise BadInput(
            f"{_VARIABLE}=dynamo needs PyTorch 2.13, here is {torch.__version__}: leave it out"
        )
    return front == "dynamo"
