"""Uses of a part's inputs, each with a gradient of its own."""

from __future__ import annotations

import torch
from torch import nn

from tightfit.capture.capture import capture
from tightfit.capture.input_uses import captured_by_uses
from tightfit.capture.traced_call import TracedCall


class Biased(nn.Module):
    """Reads both inputs twice, and before how large the second one is; a cast changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 4)

    def forward(self, x, bias):
        rows, columns = bias.size(0), bias.size(1)
        scores = self.query(x).view(columns, rows).t() + bias
        return scores.view(bias.shape) * bias, x.to(torch.float32).mean()


def test_each_use_is_an_input_of_its_own() -> None:
    module = Biased()
    inputs = torch.randn(3, 8, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    call = TracedCall(module.forward, {"part": module}, inputs, {})
    captured, repeated = captured_by_uses(capture, call)
    assert repeated == (0, 1, 1, 0)  # the last use first
    given = [source for source in captured.joint.sources if source.kind == "input"]
    assert len(given) == 6
