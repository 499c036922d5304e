"""Methods of PyTorch itself to train with less memory, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tightfit.studies.workload import Workload

__all__ = ["LossFunction", "checkpoint_per_block", "min_cut", "sequential_checkpoint"]

LossFunction = Callable[..., Tensor]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a user would checkpoint."""
    kinds = {
        "ResNet": lambda m: [b for n in range(1, 5) for b in getattr(m, f"layer{n}")],
        "MobileNetV2": lambda m: list(m.features),
        "UNet": lambda m: [*m.down, m.bottom, *m.up],
        "GPT2": lambda m: list(m.blocks),
    }
    return kinds[type(model).__name__](model)


@contextmanager
def _checkpointed(blocks: list[nn.Module]) -> Iterator[None]:
    for block in blocks:
        own = block.forward
        block.forward = lambda *args, own=own: checkpoint(own, *args, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def checkpoint_per_block(workload: Workload) -> LossFunction:
    """Return the loss with `torch.utils.checkpoint` around every block."""
    blocks = blocks_of(workload.model)

    def loss_of(*args: Any, **kwargs: Any) -> Tensor:
        with _checkpointed(blocks):
            return workload.loss_of(*args, **kwargs)

    return loss_of


def sequential_checkpoint(workload: Workload, segments: int) -> LossFunction | None:
    """Return the loss with `checkpoint_sequential`; None for a model that is no sequence."""
    model: Any = workload.model
    kind = type(model).__name__
    if kind == "GPT2":
        return _sequential_gpt2(model, segments)
    if kind == "ResNet":
        stem = [model.conv1, model.bn1, model.act, model.pool]
        parts = [*stem, *blocks_of(model), model.average, nn.Flatten(1), model.fc]
    elif kind == "MobileNetV2":
        parts = [*model.features, model.average, nn.Flatten(1), model.dropout, model.fc]
    else:
        return None
    sequence = nn.Sequential(*parts)

    def loss_of(images: Tensor, _target: Tensor) -> Tensor:
        output = checkpoint_sequential(sequence, segments, images, use_reentrant=False)
        return F.cross_entropy(output, _target)

    return loss_of


def _sequential_gpt2(model: Any, segments: int) -> LossFunction:
    sequence = nn.Sequential(*model.blocks)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = model.dropout(model.tokens(tokens) + model.positions(places))
        x = checkpoint_sequential(sequence, segments, x, use_reentrant=False)
        logits = model.head(model.ln(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    return loss_of


def min_cut(workload: Workload, budget: float) -> LossFunction:
    """Return the loss compiled with PyTorch's ``activation_memory_budget``, without Inductor.

    The backend is ``aot_eager``: the min-cut partitioner without decompositions, whose programs
    run operator by operator.
    """
    compiled = torch.compile(workload.loss_of, backend="aot_eager")

    def loss_of(*args: Any, **kwargs: Any) -> Tensor:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compiled(*args, **kwargs)

    return loss_of
