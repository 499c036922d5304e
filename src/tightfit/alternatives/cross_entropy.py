"""The gradient of a cross entropy, fused over a few rows at a time.

Eager makes the gradient of the log-probabilities (as large as the logits, almost all zeros) and
from it the gradient of the logits. Row by row both kernels give the same bits, so the first can
live in a few rows, and the result can take the place of the log-probabilities.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView, slices
from tightfit.capture.nodes import base_of

aten = torch.ops.aten

_ROWS = 4


def cross_entropy_gradient(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: torch.Tensor,
    precision: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits.

    `gradient` [N]: of the loss. `log_probabilities` [N, classes]: kept by the forward pass.
    `target` [N]: classes. `weight`, `reduction`, `ignored`, `total_weight`: as in
    ``nll_loss_backward``. `out` [N, classes]: written over; may be `log_probabilities` itself.
    """
    if out is None:
        out = torch.empty_like(log_probabilities)
    for rows in slices(log_probabilities.shape[0], _ROWS):
        part = log_probabilities[rows]
        own = gradient[rows] if gradient.dim() else gradient
        of_rows = aten.nll_loss_backward.default(
            own, part, target[rows], weight, reduction, ignored, total_weight
        )
        aten._log_softmax_backward_data.out(of_rows, part, 1, precision, out=out[rows])
    return out


def _over_log_probabilities(gradient: Any, log_probabilities: torch.Tensor, *rest: Any) -> Any:
    return cross_entropy_gradient(gradient, log_probabilities, *rest, out=log_probabilities)


def fused_cross_entropy_gradient(view: OpView) -> Extension | None:
    """Offer the fused gradient for a log-softmax backward that follows an nll-loss backward.

    Not on a GPU, where a loop over rows would launch thousands of kernels.
    """
    if not view.runs_on_cpu:
        return None
    incoming, log_probabilities, dimension, precision = view.call.args
    if not isinstance(incoming, fx.Node) or dimension != 1 or view.call.kwargs:
        return None
    loss = incoming
    only_reader = len(loss.users) == 1 and loss.target is aten.nll_loss_backward.default
    if not only_reader or loss.meta["val"].dim() != 2:
        return None
    if log_probabilities.meta["val"].dtype != precision:
        return None
    gradient, _, *rest = loss.args
    fused = Implementation(
        "cross_entropy.fused",
        cross_entropy_gradient,
        (gradient, log_probabilities, *rest, precision),
        rests_on=(loss,),
        compiles=False,
        by_rows=True,
    )
    implementations = [fused]
    own = base_of(log_probabilities).op == "call_function"
    if own and view.may_take_over(log_probabilities):
        implementations.append(
            dataclasses.replace(
                fused,
                name="cross_entropy.fused_over_log_probabilities",
                function=_over_log_probabilities,
                overwrites=log_probabilities,
            )
        )
    return Extension(tuple(implementations), optional=(loss,))
