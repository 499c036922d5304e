"""Refuse a forward that puts other objects in the place of those it found."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tightfit.errors import CaptureError

__all__ = ["members_of", "refuse_rearranged", "refuse_replaced"]


def members_of(module: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers by name, those of shared modules under each name."""
    return {
        f"{name}.{key}".lstrip("."): tensor
        for name, child in module.named_modules(remove_duplicate=False)
        for kept in (child._parameters, child._buffers)
        for key, tensor in kept.items()
    }


def refuse_replaced(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Refuse a forward that puts another tensor in the place of a parameter or buffer."""
    changed = [key for key in before if after.get(key) is not before[key]]
    if changed:
        raise CaptureError(
            f"the forward pass puts another tensor in the place of {changed[0]}. A planned step "
            "replays operators, not Python, so this would silently stop happening. Way out: write "
            f"into it (self.{changed[0].rpartition('.')[2]}.copy_(...)). The model is unchanged"
        )


def refuse_rearranged(before: tuple[list[Any], Any], after: tuple[list[Any], Any]) -> None:
    """Refuse a forward that puts something else into a container or an object it was given."""
    (leaves, spec), (now, spec_now) = before, after
    if spec != spec_now or any(
        new is not old and (isinstance(old, torch.Tensor) or new != old)
        for new, old in zip(now, leaves, strict=True)
    ):
        raise CaptureError(
            "the forward pass changes an input that is no tensor: it puts something else into a "
            "list, dict or object (a cache of keys and values, say). A planned step replays "
            "operators, not Python, so this would silently stop happening. Way out: return what "
            "is new, or call the model so without gradients"
        )
