"""A last linear layer and its cross entropy, a few rows of logits at a time.

Logits over a large vocabulary are the largest tensors of a language model's step; three of them are
there at its peak. Made for a few rows at a time and turned into gradients at once, they are never
whole, and no product is computed twice. The gradients, but for the factor that arrives in the
backward, are made in the forward (as Liger-Kernel does; Hsu et al., 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView, slices
from tightfit.capture.nodes import base_of, is_view

aten = torch.ops.aten

ROWS = (1024, 256, 64)
"""How many rows of logits may be there at once; which of them is the planner's choice."""

_MEAN, _SUM = 1, 2


def loss_and_gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    reduction: int,
    ignored: int,
    rows: int,
) -> tuple[torch.Tensor, ...]:
    """Return a cross entropy of ``x @ weight + bias``, and its gradients.

    `x` [N, width]: input of the last layer. `weight` [width, classes]: of the last layer. `bias`
    [classes]: of the last layer. `target` [N]: classes. `reduction`, `ignored`: as in
    ``nll_loss_forward``: the mean or the sum, and the class that does not count. `rows`: how many
    rows of logits are there at once. Returns the loss, how many rows count, the gradients of `x`,
    [N, width], of the weight's transpose, [classes, width], and of the bias if there is any, [1,
    classes].
    """
    counts = target != ignored
    total = counts.sum().to(x.dtype)
    share = total.reciprocal() if reduction == _MEAN else torch.ones_like(total)
    of_row = torch.where(counts, share, torch.zeros_like(share)).unsqueeze(1)
    place = torch.where(counts, target, torch.zeros_like(target)).unsqueeze(1)
    loss = torch.zeros_like(total)
    of_x = torch.empty_like(x)
    of_weight = x.new_zeros((weight.shape[1], weight.shape[0]))
    of_bias = None if bias is None else torch.zeros_like(bias).unsqueeze(0)
    for part in slices(x.shape[0], rows):
        logits = x[part] @ weight if bias is None else torch.addmm(bias, x[part], weight)
        aten._log_softmax.out(logits, 1, False, out=logits)
        loss -= (logits.gather(1, place[part]) * of_row[part]).sum()
        logits.exp_().scatter_add_(1, place[part], -torch.ones_like(of_row[part]))
        logits.mul_(of_row[part])
        torch.mm(logits, weight.t(), out=of_x[part])
        of_weight.addmm_(logits.t(), x[part])
        if of_bias is not None:
            of_bias += logits.sum(0, keepdim=True)
        del logits  # or they would still exist while the next are made
    if reduction == _MEAN:
        loss = torch.where(total > 0, loss, torch.full_like(loss, torch.nan))
    gradients = (of_x, of_weight) if of_bias is None else (of_x, of_weight, of_bias)
    return (loss, total, *gradients)


def _taken(loss: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return loss, total.clone()


@dataclass(frozen=True)
class _Found:
    """The operators of a linear layer with a cross entropy behind it."""

    # x, weight, bias: inputs of the layer
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    gradient: fx.Node  # that arrives at the loss
    # forward, backward: those between the layer's input and the loss, and back
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    # of_x, of_weight, of_bias: ops of the gradients
    of_x: fx.Node
    of_weight: fx.Node
    of_bias: fx.Node | None


def linear_cross_entropy(view: OpView) -> Extension | None:
    """Offer to make the logits behind a loss, and their gradients, a few rows at a time."""
    _, target, class_weights, reduction, ignored = view.call.args
    if class_weights is not None or reduction not in (_MEAN, _SUM):
        return None
    found = _found(view)
    if found is None:
        return None
    count = found.x.meta["val"].shape[0]
    sizes = [rows for rows in ROWS if rows < count] or [max(1, count // 2)]
    fixed = (found.x, found.weight, found.bias, target, reduction, ignored)
    name = "linear_cross_entropy"
    others = tuple((*fixed, rows) for rows in sizes[1:])
    products = 3 * 2 * count * math.prod(found.weight.meta["val"].shape)
    extra = view.extra(
        f"{name}.linear", loss_and_gradients, *fixed, sizes[0], others=others, flops=products
    )
    loss, total, *gradients = extra.results
    offer = Implementation(
        f"{name}.by_rows",
        _taken,
        (loss, total),
        overwrites=loss,
        exactness="rounding",
        rests_on=found.forward,
        compiles=False,
    )
    makers = [n for n in (found.of_x, found.of_weight, found.of_bias) if n is not None]
    rests_on = (*found.forward, view.node, *found.backward)
    scaled = tuple(
        (
            maker,
            Implementation(
                f"{name}.scaled",
                aten.mul_.Tensor,
                (gradient, found.gradient),
                overwrites=gradient,
                exactness="rounding",
                rests_on=rests_on,
                flops=0,
            ),
        )
        for maker, gradient in zip(makers, gradients, strict=True)
    )
    optional = (*found.forward, *found.backward)
    return Extension((offer,), extras=(extra,), optional=optional, together=scaled)


def _found(view: OpView) -> _Found | None:
    """Return the operators around a loss, if all that is between them serves it only."""
    softmax = view.call.args[0]
    if softmax.target is not aten._log_softmax.default or softmax.args[1:] != (1, False):
        return None
    layer = base_of(softmax.args[0])
    if layer.target not in (aten.mm.default, aten.addmm.default):
        return None
    *bias, x, weight = layer.args
    logits = layer.meta["val"]
    whole = softmax.meta["val"].shape == logits.shape
    if not whole or logits.dtype not in (torch.float32, torch.float64):
        return None
    backward = _backward(softmax)
    if backward is None or not _serve_only(view, (layer, softmax), (softmax, view.node, *backward)):
        return None
    makers = _makers(backward[-1], x, weight, bool(bias))
    if makers is None:
        return None
    own_bias = bias[0] if bias else None
    return _Found(x, weight, own_bias, backward[0].args[0], (layer, softmax), backward, *makers)


def _backward(softmax: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the ops that make the gradient of the logits."""
    for user in softmax.users:
        if user.target is aten._log_softmax_backward_data.default and user.args[1] is softmax:
            loss = user.args[0]
            own = isinstance(loss, fx.Node) and loss.target is aten.nll_loss_backward.default
            if own and loss.meta["val"].shape == softmax.meta["val"].shape:
                return loss, user
    return None


def _makers(
    gradient: fx.Node, x: fx.Node, weight: fx.Node, has_bias: bool
) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Return the ops that make the gradients of the layer's input, weight and bias."""
    shapes = {tuple(x.meta["val"].shape): 0, tuple(weight.meta["val"].shape[::-1]): 1}
    found: list[fx.Node | None] = [None, None, None]
    for reader in _readers(gradient):
        of_bias = reader.target is aten.sum.dim_IntList and list(reader.args[1]) == [0]  # type: ignore
        made = reader.meta["val"]
        kind = 2 if of_bias and made.dim() == 2 else None
        if reader.target is aten.mm.default and len(shapes) == 2:
            kind = shapes.get(tuple(made.shape))
        if kind is None or found[kind] is not None:
            return None
        found[kind] = reader
    of_x, of_weight, of_bias = found
    if of_x is None or of_weight is None or has_bias != (of_bias is not None):
        return None
    return of_x, of_weight, of_bias


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the ops that read a tensor, or a view of it."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if is_view(user) else [user]
    return found


def _serve_only(view: OpView, made: tuple[fx.Node, ...], readers: tuple[fx.Node, ...]) -> bool:
    """Whether some tensors are not kept, and read by certain ops only."""
    values = [view.value_of(node) for node in made]
    if any(value is None or value.fate != "none" for value in values):
        return False
    return {reader for node in made for reader in _readers(node)} <= {*readers}
