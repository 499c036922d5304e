"""Gradients of inputs that autograd has made: the strides and the bits of plain PyTorch.

Kernels that work in vectors give other last bits for other strides: `elu_backward` here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit

Reads = Callable[[Tensor, Tensor], Tensor]

READS: dict[str, Reads] = {
    "side by side": lambda a, b: torch.cat([a, b], 1),
    "one above the other": lambda a, b: torch.cat([a, b]),
    "added": lambda a, b: (a + b).tanh(),
    "transposed": lambda a, b: (a.T @ b).tanh(),
    "expanded": lambda a, b: (a.sum(1) * b.sum(1).exp()).tanh(),
    "expanded from outside": lambda a, b: torch.stack([a.sum(1), b.sum(1)]),
    "a part": lambda a, b: a[:, ::2].tanh() * b[:, 1:5],
}


class Reader(nn.Module):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.reads(a, b) * self.scale


def _note_strides(strides: list[tuple[int, ...]], gradient: Tensor) -> None:
    strides.append(gradient.stride())


@pytest.mark.parametrize("name", READS)
def test_strides_and_bits_are_those_of_plain_pytorch(name: str) -> None:
    results = []
    for fitted in (False, True):
        torch.manual_seed(0)
        net, first = Reader(READS[name]), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        if fitted:
            tightfit.fit(net, "64MiB", costs="unit", cache=False)
        strides: list[tuple[int, ...]] = []
        note = partial(_note_strides, strides)
        for _ in range(2):
            made = [F.elu(layer(torch.randn(60, 8))) for layer in first]
            for tensor in made:
                tensor.register_hook(note)
            net(*made).sin().sum().backward()
        results.append([*strides, *(p.grad for p in (*first.parameters(), net.scale))])
    for plain, planned in zip(*results, strict=True):
        assert torch.equal(plain, planned) if isinstance(plain, Tensor) else plain == planned


def test_an_input_may_be_a_leaf_in_one_call_and_not_in_another() -> None:
    results = []
    for fitted in (False, True):
        torch.manual_seed(0)
        net, layer = Reader(READS["side by side"]), nn.Linear(8, 8)
        if fitted:
            tightfit.fit(net, "64MiB", costs="unit", cache=False)
        leaves = [torch.randn(60, 8, requires_grad=True) for _ in range(2)]
        net(*leaves).sin().sum().backward()
        net(*(F.elu(layer(leaf)) for leaf in leaves)).sin().sum().backward()
        results.append([p.grad for p in (*leaves, *layer.parameters(), net.scale)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Doubling(nn.Module):
    """Reads a tensor twice, behind a graph break, by an operator that saves none of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.5))
        self.reference: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        self.note(made)
        return torch.cat([made, made], 1) * self.scale

    @torch.compiler.disable
    def note(self, made: Tensor) -> None:
        self.reference = weakref.ref(made)


def test_an_input_is_not_held_for_the_strides_of_its_gradient() -> None:
    plain, fitted = Doubling(), Doubling()
    tightfit.fit(fitted, "64MiB", costs="unit", cache=False)
    fitted(torch.randn(60, 8)).sum().backward()  # finds out whether one backward is all
    for net in (plain, fitted):
        output = net(torch.randn(60, 8))
        assert net.reference is not None
        assert net.reference() is None
        output.sum().backward()
