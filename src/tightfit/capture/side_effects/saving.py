"""Hooks on saved tensors (`saved_tensors_hooks`): refused by name.

They may save other values than those computed (in bfloat16, compressed) or elsewhere (on the CPU,
on disk). The tracer never calls them, so a plan would keep values that the program did not mean to
keep and compute other gradients. The hooks of non-reentrant checkpoints only decide about
recomputation: the plan does, and the bits are the same.
"""

from __future__ import annotations

from tightfit.errors import CaptureError
from tightfit.torch_private import saving as private

_WAY_OUT = (
    "Way out: leave them out (the plan "
    "decides which tensors are saved), or move the code within them out of the fitted part"
)


def refuse_saving_hooks() -> None:
    """Refuse a call within hooks that decide how tensors are saved for backward.

    Raises `CaptureError`: names the kind of the hooks.
    """
    pack = private.saving_hook()
    if pack:
        raise CaptureError(
            f"the call is fitted and called within hooks on saved tensors ({pack}): "
            f"planned gradients would differ from those with the hooks. {_WAY_OUT}"
        )
