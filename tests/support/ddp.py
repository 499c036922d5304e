"""One rank of a DistributedDataParallel step: ``python -m support.ddp RANK PORT plain|fitted``."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tightfit
from support.processes import end_rank, in_group


class Checkpointed(nn.Module):
    """Runs its body under PyTorch's checkpoint, where asked."""

    def __init__(self, body: nn.Module, *, plain: bool = True, reentrant: bool = False) -> None:
        super().__init__()
        self.body = body
        self.plain = plain
        self.reentrant = reentrant

    def forward(self, x):
        if self.plain:
            return checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.body(x)


class SharedTwice(nn.Module):
    """One layer used twice: its gradient is ready twice under reentrant checkpoints."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.layer = Checkpointed(nn.Linear(8, 8), plain=plain, reentrant=True)

    def forward(self, x):
        return self.layer(F.gelu(self.layer(x))).square().mean()


def ddp_step(rank: int, port: int, plain: bool) -> None:
    with in_group(rank, port):
        torch.manual_seed(0)
        model, reference = SharedTwice(plain=plain), SharedTwice(plain=False)
        reference.load_state_dict(model.state_dict())
        if not plain:
            tightfit.fit(model, "1GiB", costs="unit", cache=False)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        batches = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
        wrapped(batches[rank]).backward()
        expected = [
            torch.autograd.grad(reference(x), list(reference.parameters())) for x in batches
        ]
        for parameter, a, b in zip(model.parameters(), *expected, strict=True):
            torch.testing.assert_close(parameter.grad, (a + b) / 2)


if __name__ == "__main__":
    ddp_step(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "plain")
    end_rank()
