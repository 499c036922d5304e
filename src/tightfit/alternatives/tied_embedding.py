"""An embedding that shares its weight with the output layer: its gradient is added in place.

Eager makes a dense gradient as large as the vocabulary and adds it. Rows are independent, so the
embedding's gradient can be made for a stretch of the vocabulary at a time and added in place.
"""

from __future__ import annotations

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView

aten = torch.ops.aten

_ROWS = 6400


def add_embedding_gradient_(
    total: torch.Tensor,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    vocabulary: int,
    padding: int,
    scale_by_frequency: bool,
) -> torch.Tensor:
    """Add the gradient of an embedding to `total`, in place.

    `total` [vocabulary, width]: written over. `gradient` [..., width]: of the embedded words.
    `indices` [...]: the words. `vocabulary`, `padding`, `scale_by_frequency`: as in
    ``embedding_dense_backward``.
    """
    words = indices.reshape(-1)
    rows = gradient.reshape(-1, gradient.shape[-1])
    for start in range(0, vocabulary, _ROWS):
        count = min(_ROWS, vocabulary - start)
        mine = ((words >= start) & (words < start + count)).nonzero().squeeze(1)
        if mine.numel() == 0:
            continue
        inside = start <= padding < start + count
        part = aten.embedding_dense_backward.default(
            rows[mine],
            words[mine] - start,
            count,
            padding - start if inside else -1,
            scale_by_frequency,
        )
        total[start : start + count].add_(part)
        del part  # or it would still be there while the next is made
    return total


def folded_embedding_gradient(view: OpView) -> Extension | None:
    """Offer the folded sum for an in-place addition of an embedding's gradient.

    Not on a GPU, whose kernels add up the rows of a word in another order for fewer words.
    """
    if not view.runs_on_cpu:
        return None
    total, other = view.call.args
    if not isinstance(other, fx.Node) or view.call.kwargs:
        return None
    if other.target is not aten.embedding_dense_backward.default or len(other.users) != 1:
        return None
    offer = Implementation(
        "tied_embedding.folded",
        add_embedding_gradient_,
        (total, *other.args),
        overwrites=total,
        rests_on=(other,),
        compiles=False,
    )
    return Extension((offer,), optional=(other,))
