"""Uses of a part's inputs, each with a gradient of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import tightfit
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


class Attends(nn.Module):
    """PyTorch asks whether query, key and value are one tensor, and projects them at once then."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        direction = F.normalize(x, dim=-1)  # reads it twice, in Python
        return x + self.attention(x, x, x, need_weights=False)[0] * direction


def test_uses_inside_of_functions_in_python_are_seen_and_inputs_stay_the_same_tensor() -> None:
    module = Attends()
    call = TracedCall(
        module.forward, {"part": module}, (torch.randn(3, 2, 8).requires_grad_(),), {}
    )
    captured, repeated = captured_by_uses(capture, call)
    # by the sum, the projection; a division, a shape (which has no gradient) and a norm
    assert repeated == (0, 0, 0, 0, 0)
    made = [node.meta.get("val") for node in captured.joint.module.graph.nodes]
    assert (6, 24) in [x.shape for x in made if isinstance(x, torch.Tensor)]  # all three in one


def test_attention_after_a_graph_break_has_the_gradients_of_plain_pytorch() -> None:
    class Breaks(Attends):
        def forward(self, x):
            hidden = super().forward(x)
            if hidden.sum().item() > 1e9:
                return hidden
            return super().forward(hidden)

    gradients = []
    for budget in (None, "16MiB"):
        torch.manual_seed(0)
        module = Breaks()
        if budget is not None:
            tightfit.fit(module, budget, cache=False)
        (module(torch.randn(12, 4, 8)) * torch.randn(12, 4, 8)).sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *gradients))
