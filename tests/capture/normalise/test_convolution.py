"""The backward of a convolution is split where that frees its input, and stays bitwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall


class Convolutions(nn.Module):
    """Grouped, strided, transposed and one-dimensional convolutions between activations."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            activation(),
            nn.Conv2d(8, 16, 3, padding=1),
            activation(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            activation(),
            nn.Conv2d(16, 32, 1),
            activation(),
            nn.ConvTranspose2d(32, 16, 2, stride=2),
            activation(),
            nn.Conv2d(16, 8, 3, stride=2, padding=1),
            activation(),
            nn.Flatten(2),
            nn.Conv1d(8, 8, 3),
        )

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(images).mean(-1), classes)


def convolution_backwards(model: nn.Module, *args: Tensor) -> list[list[bool]]:
    captured = capture(TracedCall(model, {"model": model}, args, {}))
    nodes = captured.joint.module.graph.nodes
    return [n.args[10] for n in nodes if n.target is torch.ops.aten.convolution_backward.default]


@pytest.mark.parametrize(("activation", "joint"), [(nn.GELU, 2), (nn.SiLU, 2), (nn.ReLU, 3)])
def test_last_readers_and_large_ones_are_split(activation: type[nn.Module], joint: int) -> None:
    """The two that shrink their input never are: the gradient cannot stand in for it."""
    masks = convolution_backwards(
        Convolutions(activation), torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
    )
    assert sum(mask[0] and mask[1] for mask in masks) == joint


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_split_backwards_are_bitwise_within_the_budget(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Convolutions(nn.GELU).to(memory_format=memory_format)
    images = torch.randn(4, 3, 32, 32).to(memory_format=memory_format)
    proof = tightfit.prove(
        (model, None, (images, torch.arange(4)), None), budget="minimum", steps=2, rounds=0
    )
    assert proof.succeeded
    assert proof.bitwise
