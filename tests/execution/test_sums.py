"""Gradients that meet those of other open calls: memory that has passed on has no owner."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import tightfit
from tightfit.allocator.recording import record

LAYERS, WIDTH = 6, 64


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def requested_in_backward(model: nn.Module) -> list[int]:
    """Return the sizes that a backward requests in which gradients are added to older ones."""
    for _ in range(3):
        model(torch.ones(8, WIDTH)).sum().backward()
    loss = model(torch.ones(8, WIDTH)).sum()
    with record() as recorder:
        loss.backward()
    return sorted(block.size_bytes for block in recorder.recording.blocks if block.thread == 0)


@pytest.fixture
def fitted() -> nn.Module:
    gc.collect()  # calls that earlier tests have left open
    return tightfit.fit(net(), "8MiB", costs="unit", cache=False)


def test_a_call_left_open_elsewhere_costs_a_backward_no_memory(fitted: nn.Module) -> None:
    alone = requested_in_backward(fitted)
    other = tightfit.fit(net(), "8MiB", costs="unit", cache=False)
    open_call = other(torch.ones(8, WIDTH))
    assert open_call.requires_grad
    assert requested_in_backward(fitted) == alone


class Head(nn.Module):
    """A loss and its input, whose gradient has another layout than itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.pixels = nn.Linear(16, 32), nn.Conv2d(32, 5, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.pixels(self.tokens(x).permute(0, 2, 1).reshape(4, 32, 16, 16))
        return nn.functional.cross_entropy(logits, y), logits


def test_an_output_without_a_gradient_changes_no_order_of_sums() -> None:
    """Zeros in place of its gradient lie as what they are added to."""
    torch.manual_seed(0)
    plain, x, y = Head(), torch.randn(4, 256, 16), torch.randint(0, 5, (4, 16, 16))
    model = copy.deepcopy(plain)
    tightfit.fit(model, "64MiB", costs="unit", cache=False)
    for net in (plain, model):
        net(x, y)[0].backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)


class Reader(nn.Module):
    """Reads an input twice, as attention reads its keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(96, 96)

    def forward(self, query: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        weights = torch.tanh(self.key(read) + query).sum(-1).softmax(-1)
        return torch.bmm(weights[:, None], read)


def test_gradients_of_calls_meet_in_order_where_the_input_has_another_layout() -> None:
    """As outputs of a GRU with `batch_first=True`, which are transposed."""
    found = []
    for fits in (False, True):
        torch.manual_seed(0)
        model = Reader()
        if fits:
            tightfit.fit(model, "1GiB", costs="unit", cache=False)
        source = torch.randn(3, 32, 96, requires_grad=True)
        read, state = source.tanh().transpose(0, 1), torch.zeros(32, 1, 96)
        for _ in range(3):
            state = model(state, read)
        state.square().sum().backward()
        found.append(source.grad)
    assert torch.equal(*found)


class NormedWeight(nn.Module):
    """Returns the weight of a convolution, as `torch.nn.utils.weight_norm` leaves it behind."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.g = nn.Parameter(torch.ones(4, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._weight_norm(self.v, self.g, 0)


class ComplexWeight(nn.Module):
    """Returns a complex parameter as real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(4, 3, 8, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.v * 2).flatten(3)


@torch.library.custom_op("tests_sums::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@torch.library.custom_op("tests_sums::twice_backward", mutates_args=())
def twice_backward(gradient: torch.Tensor) -> torch.Tensor:
    """Reads memory as it is, as a kernel in C does."""
    read = gradient.as_strided((gradient.numel(),), (1,))
    return (2 * read).view(gradient.shape)


twice.register_fake(torch.empty_like)
twice_backward.register_fake(torch.empty_like)
twice.register_autograd(lambda _, gradient: twice_backward(gradient.contiguous()))


class WeightOfLibrary(nn.Module):
    """Returns a weight that an operator of another library makes."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(self.v)


@pytest.mark.parametrize("module", [NormedWeight, ComplexWeight, WeightOfLibrary])
def test_operators_that_need_a_contiguous_gradient_get_one(module: type[nn.Module]) -> None:
    """Code outside the plan gives the output a gradient with other strides than were traced."""
    torch.manual_seed(0)
    plain, x = module(), torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    model = copy.deepcopy(plain)
    tightfit.fit(model, "64MiB", costs="unit", cache=False)
    for net in (plain, model):
        nn.functional.conv2d(x, net(x)).square().sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)
