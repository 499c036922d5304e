"""Which modules of a model can be planned each by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["has_parts", "may_be_planned"]


def has_parts(modules: dict[str, nn.Module], root: Any) -> bool:
    """Whether there is something to plan below the outermost forward, on one device."""
    tops = modules.values()
    if len({p.device for top in tops for p in top.parameters()}) > 1:
        return False
    return any(
        may_be_planned(module)
        for top in tops
        for module in top.modules()
        if root is None or module is not top
    )


def may_be_planned(module: nn.Module) -> bool:
    """Whether a module holds others and is trained; the smallest are left as they are."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule):
        return False
    if type(module).__name__ == "OptimizedModule":
        return False
    return next(module.children(), None) is not None and any(
        p.requires_grad for p in module.parameters()
    )
