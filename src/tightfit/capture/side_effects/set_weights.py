"""Weights that are computed outside of the forward that is planned: refused by name.

Inside of it they are operators like others: old norms and pruning, whose hooks set a weight anew
in every forward, and parametrizations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = ["refuse_weights_from_outside"]


def refuse_weights_from_outside(
    function: Callable[..., Any], modules: Mapping[str, nn.Module]
) -> None:
    """Refuse a forward whose weights somebody computes around it.

    Raises
    ------
    CaptureError
        If parametrizations are cached around the call, or a hook of the outermost module, which
        runs before its forward, has set its weight.
    """
    for prefix, top in modules.items():
        for name, module in top.named_modules():
            if private.caches_parametrizations() and parametrize.is_parametrized(module):
                where = ".".join(p for p in (prefix, name) if p)
                raise CaptureError(
                    f"the call runs within parametrize.cached(), and {where!r} is parametrized: "
                    "its weight would be computed once for all calls, which a plan of one call "
                    "cannot hold. Way out: parametrize.cached() inside the forward, or all calls "
                    "in one function for tightfit.step"
                )
        if getattr(function, "__self__", None) is top and top._forward_pre_hooks:
            for key, value in top.__dict__.items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    raise CaptureError(
                        f"a hook of the outermost module sets its {key!r} before the forward that "
                        "is planned. Way out: fit a module around it (nn.Sequential(model)), or "
                        "call the model in a function for tightfit.step"
                    )
