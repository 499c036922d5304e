"""BatchNorm computed again: without touching the running statistics.

The first run updates running statistics, so it cannot simply run twice. Both implementations
below give bitwise the same output (whole_chain.md, section 3).
"""

from __future__ import annotations

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView

aten = torch.ops.aten


def normalise_with_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``(x - mean) * inverse_deviation * weight + bias`` per channel (dimension 1).

    The evaluation kernel with variance 1, epsilon 0 and the inverse deviation folded into the
    weight: the same multiplications in the same order as in training.
    """
    scale = inverse_deviation if weight is None else weight * inverse_deviation
    ones = torch.ones_like(mean)
    if out is not None:
        none = x.new_empty(0)
        return aten.native_batch_norm.out(
            x, scale, bias, mean, ones, False, 0.0, 0.0, out=out, save_mean=none, save_invstd=none
        )[0]
    norm = aten._native_batch_norm_legit_no_training.default
    return norm(x, scale, bias, mean, ones, 0.0, 0.0)[0]


def train_with_own_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    epsilon: float,
    precision: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Run a BatchNorm in training on throw-away running statistics.

    Their precision decides that of the batch statistics, as in the first run.
    """
    mean, variance = torch.zeros(2, x.shape[1], dtype=precision, device=x.device)
    return aten._native_batch_norm_legit_functional.default(
        x, weight, bias, mean, variance, True, momentum, epsilon
    )[:3]


def statistics_of(view: OpView, norm: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return mean and inverse deviation of a training BatchNorm that its output is made of.

    None where they were rounded to half precision, for the first run used them unrounded, and on a
    GPU, whose kernels multiply in another order in training than in evaluation.
    """
    mean, deviation = view.output_of(norm, 1), view.output_of(norm, 2)
    if mean is None or deviation is None or not norm.args[5] or not view.runs_on_cpu:
        return None
    precise = mean.meta["val"].dtype in (torch.float32, torch.float64)
    return (mean, deviation) if precise else None


def batch_norm_again(view: OpView) -> Extension | None:
    """Offer the two recomputations of a training BatchNorm.

    One reads only its inputs and makes output and batch statistics again; the other reads the
    statistics of the first run, which are tiny, and is several times cheaper.
    """
    x, weight, bias, running_mean, _, training, momentum, epsilon = view.call.args
    if not training:
        return None
    precision = view.node.meta["val"][1].dtype
    if not view.runs_on_cpu:
        own = running_mean.meta["val"].dtype
        run = (train_with_own_statistics, (x, weight, bias, momentum, epsilon, own))
    elif weight is None and precision != x.meta["val"].dtype:
        run = (train_with_own_statistics, (x, None, None, momentum, epsilon, precision))
    else:
        run = (aten._native_batch_norm_legit.no_stats, (x, weight, bias, True, momentum, epsilon))
    offers = [Implementation("batch_norm.again", *run, outputs=(0, 1, 2), use="again")]
    statistics = statistics_of(view, view.node)
    if statistics is not None:
        args = (x, weight, bias, *statistics)
        name = "batch_norm.from_statistics"
        rests_on = (view.node,)
        offers.append(
            Implementation(
                name, normalise_with_statistics, args, outputs=0, use="again", rests_on=rests_on
            )
        )
    return Extension(tuple(offers), default_use="first", unpins=True)


def update_own_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    epsilon: float,
    precision: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Run the operator again on throw-away running statistics of the first run's precision.

    Returns the output, the batch's mean and inverse deviation, cuDNN's reserve for backward.
    """
    mean, variance = torch.zeros(2, x.shape[1], dtype=precision, device=x.device)
    return aten._batch_norm_with_update_functional.default(
        x, weight, bias, mean, variance, momentum, epsilon
    )[:4]


def update_again(view: OpView) -> Extension | None:
    """Offer the recomputation of a BatchNorm that cuDNN may compute: all its outputs, once more.

    It reads only its inputs; cuDNN's reserve belongs to the run that made it, so all of them are
    made together.
    """
    x, weight, bias, running_mean, _, momentum, epsilon = view.call.args
    args = (x, weight, bias, momentum, epsilon, running_mean.meta["val"].dtype)
    name = "batch_norm.update_again"
    offer = Implementation(name, update_own_statistics, args, outputs=(0, 1, 2, 3), use="again")
    return Extension((offer,), default_use="first", unpins=True)
