"""A model around a function, and a case of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support.models import PLANNED, Case
from tightfit.torch_private.releases import Since


class Wrapped(nn.Module):
    """A linear layer, then a function of the module, its output and the other inputs."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x, *args, **kwargs):
        return self.function(self, self.a(x), *args, **kwargs)


def image() -> torch.Tensor:
    return torch.randn(4, 8)


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def case(
    name: str,
    function: Callable[..., Any],
    *inputs: Callable[[], Any],
    where: str = PLANNED,
    before: tuple[Since, str] | None = None,
    **modules: Callable[[], nn.Module],
) -> Case:
    """Return a case of a function, with modules that are new for each model."""
    makers = inputs or (image,)
    return Case(
        name,
        lambda: Wrapped(function, **{k: m() for k, m in modules.items()}),
        lambda: tuple(make() for make in makers),
        squares,
        where=where,
        before=before,
    )
