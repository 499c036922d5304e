"""Random operators computed again: the same numbers, drawn from the generator's old state."""

from __future__ import annotations

import torch

from tightfit.alternatives.base import Extension, Implementation, OpView, is_dense

aten = torch.ops.aten


def draw_again(view: OpView) -> Extension | None:
    """Offer the second run of a random operator, which takes more memory than the first.

    While it draws again from the state the first run started with, the generator's present state
    is put aside.
    """
    if not view.op.random_state_bytes or view.op.pinned is not None:
        return None
    call = view.call
    again = Implementation("draw_again", call.function, call.args, call.kwargs, use="again")
    return Extension((again,), default_use="first")


def drawn(shape: tuple[int, ...], strides: tuple[int, ...], keep: float) -> torch.Tensor:
    """Return a dropout's mask from the generator's state, as a CPU draws it.

    `keep`: the probability to be kept.
    """
    return aten.bernoulli_.float(torch.empty_strided(shape, strides, dtype=torch.bool), keep)


def mask_again(view: OpView) -> Extension | None:
    """Offer the mask of a dropout once more without its input, on a CPU.

    The generator's old state takes 5 KB; a draw costs more than a multiplication.
    """
    value = view.node.meta["val"][1]
    if not view.runs_on_cpu or view.op.pinned is not None or not is_dense(value):
        return None
    args = (tuple(value.shape), tuple(value.stride()), 1 - view.call.args[1])
    offer = Implementation(
        "dropout.mask_again", drawn, args, outputs=1, use="again", compiles=False
    )
    return Extension((offer,))
