"""Random operators computed again: the same numbers, drawn from the generator's old state."""

from __future__ import annotations

from tightfit.alternatives.base import Extension, OpView, Way

__all__ = ["draw_again"]


def draw_again(view: OpView) -> Extension | None:
    """Offer the second run of a random operator, which takes more memory than the first.

    While it draws again from the state the first run started with, the generator's present state
    is put aside.
    """
    if not view.op.random_state_bytes or view.op.pinned is not None:
        return None
    call = view.call
    again = Way("draw_again", call.function, call.args, call.kwargs, use="again")
    return Extension((again,), default_use="first")
