"""Refuse a forward that puts other objects in the place of those it found."""

from __future__ import annotations

from typing import Any

import torch

from tightfit.errors import CaptureError

__all__ = ["refuse_rearranged"]


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
            "is new, call the model so without gradients, or leave the cache out (use_cache=False)"
        )
