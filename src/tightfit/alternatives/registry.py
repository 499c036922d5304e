"""The table of operator alternatives: one file for each operator family, one line here.

An entry is a function from an op of a captured step to further ways of computing it.
"""

from __future__ import annotations

from typing import Any

import torch

from tightfit.alternatives.assembling import Assembly
from tightfit.alternatives.base import Contributor, OpView, Way
from tightfit.alternatives.batch_norm import batch_norm_again, update_again
from tightfit.alternatives.convolution import split_gradient
from tightfit.alternatives.cross_entropy import fused_cross_entropy_gradient
from tightfit.alternatives.draw_again import draw_again
from tightfit.alternatives.dropout import dropout_gradient
from tightfit.alternatives.from_output import elu_gradient, hardtanh_gradient, leaky_relu_gradient
from tightfit.alternatives.in_place import IN_PLACE, in_place
from tightfit.alternatives.linear_cross_entropy import linear_cross_entropy
from tightfit.alternatives.max_pool import max_pool_gradient
from tightfit.alternatives.relu import relu_gradient
from tightfit.alternatives.tied_embedding import folded_embedding_gradient
from tightfit.capture.captured import Captured
from tightfit.errors import BadInput
from tightfit.graph.ir import Exactness

__all__ = ["CONTRIBUTORS", "EXACTNESS", "GROUPS", "compilable", "with_alternatives"]

aten = torch.ops.aten

EXACTNESS: tuple[Exactness, ...] = ("bitwise", "rounding", "lossy")
"""How exact an alternative may be, the strictest first; each class includes those before it."""

CONTRIBUTORS: dict[Any, tuple[Contributor, ...]] = {
    aten._native_batch_norm_legit_functional.default: (batch_norm_again,),
    aten._batch_norm_with_update_functional.default: (update_again,),
    aten._log_softmax_backward_data.default: (fused_cross_entropy_gradient,),
    aten.add_.Tensor: (folded_embedding_gradient,),
    aten.hardtanh_backward.default: (hardtanh_gradient,),
    aten.leaky_relu_backward.default: (leaky_relu_gradient,),
    aten.elu_backward.default: (elu_gradient,),
    aten.convolution_backward.default: (split_gradient,),
    aten.threshold_backward.default: (relu_gradient,),
    aten.nll_loss_forward.default: (linear_cross_entropy,),
    aten.max_pool2d_with_indices_backward.default: (max_pool_gradient,),
    aten.max_pool3d_with_indices_backward.default: (max_pool_gradient,),
    aten.native_dropout_backward.default: (dropout_gradient,),
}
for _target in IN_PLACE:  # last: what others offer may run in place too
    CONTRIBUTORS[_target] = (*CONTRIBUTORS.get(_target, ()), in_place)


_ALWAYS: tuple[Contributor, ...] = (batch_norm_again, update_again, draw_again)
"""Ways of doing once more what runs by itself once only: no op is recomputed without them."""

GROUPS: dict[str, tuple[Contributor, ...]] = {
    "none": (),
    "conv": (split_gradient,),
    "output": (hardtanh_gradient, leaky_relu_gradient, elu_gradient),
    "intermediate": (
        relu_gradient,
        max_pool_gradient,
        dropout_gradient,
        fused_cross_entropy_gradient,
        linear_cross_entropy,
        folded_embedding_gradient,
    ),
    "inplace": (in_place,),
}
"""The alternatives by what they are, for comparisons (MONeT, section 6.3); also ``"all"``."""


def with_alternatives(
    captured: Captured, exactness: Exactness = "bitwise", group: str = "all"
) -> Captured:
    """Return the captured step with the alternatives that the registry knows for its ops.

    Parameters
    ----------
    captured : Captured
        As it was traced.
    exactness : str
        The least exact class that is allowed.
    group : str
        Only these, for comparisons: a name of `GROUPS`, or ``"all"``.

    Raises
    ------
    BadInput
        For an unknown group; lists the known ones.
    """
    if group not in (*GROUPS, "all"):
        known = ", ".join((*GROUPS, "all"))
        raise BadInput(f"no alternatives are called {group!r} (known: {known})")
    assembly = Assembly(captured)
    allowed = EXACTNESS[: EXACTNESS.index(exactness) + 1]
    for op in captured.graph.ops:
        offered: tuple[Way, ...] = ()
        for contributor in (*CONTRIBUTORS.get(captured.nodes[op.id].target, ()), draw_again):
            if group != "all" and contributor not in (*_ALWAYS, *GROUPS[group]):
                continue
            extension = contributor(OpView(captured, op, offered))
            if extension is not None:
                offered += assembly.add(op, extension, allowed)
    return assembly.finished()


def compilable(captured: Captured) -> Captured:
    """Return a step with those of its alternatives that are of use to a compiler."""
    return captured.keeping(lambda op, way, call: call.compiles)
