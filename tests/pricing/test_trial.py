"""An op runs on drawn tensors, after the ops that its alternative rests on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.pricing.trial import Trial

LENGTH = 400  # of a chain; Python gives up recursion of a thousand frames


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self) -> torch.Tensor:
        x = self.weight
        for _ in range(LENGTH):
            x = F.silu(x)
        return x.sum()


def test_an_op_may_rest_on_a_long_chain() -> None:
    model = Chain()
    step = capture(TracedCall(model, {"model": model}, (), {}))
    defaults = {node: calls[0] for node, calls in zip(step.nodes, step.calls, strict=True)}
    chain = [n for n in step.nodes if n.target is torch.ops.aten.silu.default]
    assert len(chain) == LENGTH
    trial = Trial(step, defaults, chain)
    (last,) = trial.results(defaults[chain[-1]]).values()
    (expected,) = trial.results(defaults[chain[0]]).values()
    for _ in range(LENGTH - 1):
        expected = F.silu(expected)
    assert torch.equal(last, expected)
