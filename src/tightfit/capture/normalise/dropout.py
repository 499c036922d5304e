"""Dropout that scales as plain PyTorch does on a CPU; the traced operator rounds differently."""

from __future__ import annotations

import torch

from tightfit.capture.nodes import note_random
from tightfit.capture.normalise.rewriting import Rewriting
from tightfit.capture.operators.dropout import scaled_dropout

aten = torch.ops.aten


def correct_dropout(work: Rewriting) -> None:
    """Let every dropout of a traced step, and its backward, scale as plain PyTorch does."""
    for node in work.graph.nodes:
        if node.target is not aten.native_dropout.default:
            continue
        x, probability, training = node.args
        value = x.meta["val"]
        if value.device.type != "cpu" or not training or not 0 < probability < 1:
            continue
        scale = torch.ones((), dtype=value.dtype).div_(1 - probability).item()
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        if scale == torch.tensor(1 / (1 - probability), dtype=wide).item():
            continue
        node.target = scaled_dropout
        node.args = (x, probability, scale)
        note_random(node, True)
        for output in list(node.users):
            for user in list(output.users):
                if user.target is aten.native_dropout_backward.default:
                    user.update_arg(2, scale)
