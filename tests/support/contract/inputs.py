"""Makers of inputs: each step gets new ones, drawn from the step's seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Inputs = Callable[[nn.Module], tuple[Any, ...]]


def given(*makers: Callable[[], Any]) -> Inputs:
    """Return what makes a tuple of inputs."""
    return lambda module: tuple(make() for make in makers)


def data() -> torch.Tensor:
    """Return a batch that needs no gradient."""
    return torch.randn(4, 8)


def leaf() -> torch.Tensor:
    """Return a batch that collects a gradient."""
    return torch.randn(4, 8, requires_grad=True)


def inner() -> torch.Tensor:
    """Return a batch that was computed of something that collects a gradient."""
    return leaf() * 1


def complex_data() -> torch.Tensor:
    """Return a batch of complex numbers."""
    return torch.randn(4, 8, dtype=torch.complex64)


def every_other_conjugated(module: nn.Module) -> tuple[torch.Tensor]:
    """Return complex numbers; in every other step they are conjugated when they are read."""
    numbers = complex_data()
    return (numbers.conj() if torch.initial_seed() % 2 else numbers,)


two = given(data, data)
