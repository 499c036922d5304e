"""A callable that is fitted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.structure import Arguments


@dataclass(frozen=True)
class Callee:
    """A callable with the modules whose parameters it uses."""

    function: Callable[..., Any]  # the module's own forward, or the function given to `step`
    modules: Mapping[str, nn.Module]
    name: str  # for messages and graphs
    fitted: weakref.ref[nn.Module] | None = None  # the module fitted in place

    @property
    def root(self) -> nn.Module | None:
        """The module fitted in place, if there is any; its hooks run around the step."""
        return self.fitted() if self.fitted is not None else None

    def trains(self, given: Arguments) -> bool:
        """Whether a backward may follow a call: gradients are on and something needs a gradient."""
        return torch.is_grad_enabled() and self.needs_gradient(given)

    def needs_gradient(self, given: Arguments) -> bool:
        for x in given.leaves:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
        return any(map(_needs_gradient, self.modules.values()))


def _needs_gradient(module: nn.Module) -> bool:
    """Whether a parameter requires a gradient: the first that does ends the search."""
    own = vars(module)
    if "_parameters" not in own:  # a scripted module has them elsewhere
        return any(p.requires_grad for p in module.parameters())
    for parameter in own["_parameters"].values():
        if parameter is not None and parameter.requires_grad:
            return True
    return any(map(_needs_gradient, [m for m in own["_modules"].values() if m is not None]))
