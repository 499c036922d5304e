"""The ways in which a module is made to train within a budget, and plain PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tightfit

Call = Callable[..., Any]
Door = Callable[[nn.Module, str], Call]
"""Takes a module and a budget; returns what is called in the module's place."""


def plain(module: nn.Module, budget: str) -> Call:
    """Leave the module as it is."""
    return module


def fitted(module: nn.Module, budget: str = "1GiB") -> Call:
    """Fit a module in place."""
    return tightfit.fit(module, budget, costs="unit", cache=False)


def by_backend(module: nn.Module, budget: str) -> Call:
    """Let Dynamo hand its graphs to tightfit."""
    options = {"budget": budget, "costs": "unit", "cache": False}
    return torch.compile(module, backend="tightfit", options=options)


def by_aot_eager(module: nn.Module, budget: str) -> Call:
    """Show what PyTorch's own machinery does without a plan."""
    return torch.compile(module, backend="aot_eager")


DOORS: dict[str, Door] = {"fit": fitted, "backend": by_backend, "aot_eager": by_aot_eager}


def asked_door() -> str:
    """Return the name of the door that this process judges."""
    return os.environ.get("TIGHTFIT_DOOR", "fit")
