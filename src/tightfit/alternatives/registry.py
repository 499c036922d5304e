"""The table of operator alternatives: one file for each operator family, one line here.

An entry is a function from an op of a captured step to further implementations of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.assembling import Assembly
from tightfit.alternatives.attention import ATTENTION, attention
from tightfit.alternatives.base import Contributor, Implementation, OpView
from tightfit.alternatives.convolutions.by_images import (
    convolution_by_images,
    gradients_of_convolution_by_images,
)
from tightfit.alternatives.convolutions.cudnn import convolution_by_cudnn
from tightfit.alternatives.convolutions.split import split_gradient
from tightfit.alternatives.cross_entropy import fused_cross_entropy_gradient
from tightfit.alternatives.draw_again import draw_again, mask_again
from tightfit.alternatives.dropout import dropout_gradient
from tightfit.alternatives.from_output import (
    elu_gradient,
    hardtanh_gradient,
    leaky_relu_gradient,
    softplus_gradient,
)
from tightfit.alternatives.hardsigmoid import hardsigmoid_gradient
from tightfit.alternatives.in_place import IN_PLACE, in_place
from tightfit.alternatives.linear_cross_entropy import linear_cross_entropy
from tightfit.alternatives.max_pool import MAX_POOL_GRADIENTS, max_pool_gradient
from tightfit.alternatives.norms.again import batch_norm_again, update_again
from tightfit.alternatives.norms.from_output import (
    batch_norm_from_output,
    group_norm_from_output,
    layer_norm_from_output,
)
from tightfit.alternatives.norms.rms_from_output import rms_norm_from_output
from tightfit.alternatives.relu import relu_gradient
from tightfit.alternatives.stash import kept_in_fewer_bytes
from tightfit.alternatives.tied_embedding import folded_embedding_gradient
from tightfit.alternatives.together import TOGETHER, together
from tightfit.capture.captured import Captured
from tightfit.capture.operators.dropout import scaled_dropout
from tightfit.errors import BadInput
from tightfit.graph.ir import EXACTNESS, Exactness

aten = torch.ops.aten


@dataclass(frozen=True)
class Entry:
    """A contributor, and the ops it is asked about."""

    contributor: Contributor  # from an `OpView` to an `Extension` or None
    # The kind of its alternatives, for comparisons (MONeT, section 6.3). "again": those to run an
    # op once more that by itself runs only once; every comparison has them
    group: str
    operators: tuple[Any, ...] | None  # the ops it is asked about; None: all
    exactness: Exactness = "bitwise"  # of its alternatives; asked only where that is allowed


ENTRIES = (
    Entry(batch_norm_again, "again", (aten._native_batch_norm_legit_functional.default,)),
    Entry(update_again, "again", (aten._batch_norm_with_update_functional.default,)),
    Entry(hardtanh_gradient, "output", (aten.hardtanh_backward.default,)),
    Entry(leaky_relu_gradient, "output", (aten.leaky_relu_backward.default,)),
    Entry(elu_gradient, "output", (aten.elu_backward.default,)),
    Entry(softplus_gradient, "output", (aten.softplus_backward.default,)),
    Entry(batch_norm_from_output, "output", (aten.native_batch_norm_backward.default,), "rounding"),
    Entry(layer_norm_from_output, "output", (aten.native_layer_norm_backward.default,), "rounding"),
    Entry(group_norm_from_output, "output", (aten.native_group_norm_backward.default,), "rounding"),
    Entry(rms_norm_from_output, "output", (aten.mul.Tensor, aten.pow.Tensor_Scalar), "rounding"),
    Entry(relu_gradient, "intermediate", (aten.threshold_backward.default,)),
    Entry(hardsigmoid_gradient, "intermediate", (aten.hardsigmoid_backward.default,)),
    Entry(max_pool_gradient, "intermediate", MAX_POOL_GRADIENTS),
    Entry(dropout_gradient, "intermediate", (aten.native_dropout_backward.default,)),
    Entry(fused_cross_entropy_gradient, "intermediate", (aten._log_softmax_backward_data.default,)),
    Entry(linear_cross_entropy, "intermediate", (aten.nll_loss_forward.default,)),
    Entry(folded_embedding_gradient, "intermediate", (aten.add_.Tensor,)),
    Entry(split_gradient, "conv", (aten.convolution_backward.default,)),
    Entry(convolution_by_images, "conv", (aten.convolution.default,)),
    Entry(
        gradients_of_convolution_by_images, "conv", (aten.convolution_backward.default,), "rounding"
    ),
    Entry(
        convolution_by_cudnn,
        "conv",
        (aten.convolution.default, aten.convolution_backward.default),
        "rounding",
    ),
    Entry(attention, "attention", ATTENTION, "rounding"),
    Entry(together, "together", TOGETHER),
    Entry(kept_in_fewer_bytes, "stash", None, "lossy"),
    Entry(in_place, "inplace", tuple(IN_PLACE)),  # behind all that may run in place too
    Entry(draw_again, "again", None),
    Entry(mask_again, "again", (aten.native_dropout.default, scaled_dropout)),
)

GROUPS = ("none", *dict.fromkeys(e.group for e in ENTRIES if e.group != "again"), "all")
"""Kinds of alternatives that a comparison may name."""


def _entries(group: str, allowed: Sequence[Exactness]) -> tuple[Entry, ...]:
    groups = {e.group for e in ENTRIES} if group == "all" else {group, "again"}
    return tuple(e for e in ENTRIES if e.group in groups and e.exactness in allowed)


def with_alternatives(
    captured: Captured,
    exactness: Exactness = "bitwise",
    group: str = "all",
    present: Mapping[fx.Node, torch.Tensor] | None = None,
) -> Captured:
    """Return the captured step with the alternatives that the registry knows for its ops.

    `exactness`: the least exact class that is allowed. `group`: only these, for comparisons: a name
    of `GROUPS`. `present`: parameters for which `Captured.conditions` are checked
    in every step; None: conditions are taken to hold, as for a plan that is not run. Raises
    `BadInput` for an unknown group; lists the known ones.

    Where gradients come with strides that were not traced, operators on them have no alternatives.
    The result of an alternative has the strides of the trace, and kernels that read it may round
    otherwise.
    """
    if group not in GROUPS:
        raise BadInput(f"no alternatives are called {group!r} (known: {', '.join(GROUPS)})")
    assembly = Assembly(captured)
    allowed = EXACTNESS[: EXACTNESS.index(exactness) + 1]
    entries = _entries(group, allowed)
    fixed = captured.joint.backward if captured.joint.other_strides else set[fx.Node]()
    for op, node in zip(captured.graph.ops, captured.nodes, strict=True):
        offered: tuple[Implementation, ...] = ()
        for entry in () if node in fixed or _takes_numbers(node) else entries:
            if entry.operators is not None and node.target not in entry.operators:
                continue
            extension = entry.contributor(OpView(captured, op, offered, present))
            if extension is not None:
                offered += assembly.add(op, extension, allowed)
    return assembly.finished()


def _takes_numbers(node: fx.Node) -> bool:
    """Whether an op takes a number that may change in the next step."""
    return any(isinstance(each.meta.get("val"), int | float) for each in node.all_input_nodes)


def compilable(captured: Captured) -> Captured:
    """Return a step without alternatives that are of no use to a compiler."""
    return captured.keeping(lambda op, offer, call: call.compiles)
