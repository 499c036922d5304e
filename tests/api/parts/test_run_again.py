"""Callables of several graphs whose backward comes twice, or is differentiated, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from benchmarks.training_loops import Run, live
from support.lives import assert_trained_alike
from tightfit.allocator import meter_for
from tightfit.errors import TightfitError
from tightfit.session.handles import attach_by_parts
from tightfit.session.options import make_options

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")

WIDTH = 48


class Broken(nn.Module):
    """Three graphs: it prints, and decides by a number. A skip connection crosses both breaks."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.drop = nn.Dropout(dropout)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, width) for width in (5, 3))

    def trunk(self, x: Tensor) -> Tensor:
        early = torch.tanh(self.layers[0](x))
        hidden = self.drop(self.norm(self.layers[1](early)))
        print(end="")
        hidden = torch.tanh(hidden) * hidden + early
        hidden = self.layers[2](hidden)
        if hidden.mean().item() > 1e6:
            hidden = -hidden
        hidden = torch.tanh(self.layers[3](torch.tanh(hidden)) + early * hidden)
        return self.layers[4](hidden) + early

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.trunk(x)
        return [head(hidden) for head in self.heads]


def losses_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [y.square().mean() for y in model(x)]


def the_same_thrice(model: Broken, x: Tensor) -> None:
    loss = torch.stack(losses_of(model, x)).sum()
    for last in (False, False, True):
        loss.backward(retain_graph=not last)


def one_after_the_other(model: Broken, x: Tensor) -> None:
    one, other = losses_of(model, x)
    one.backward(retain_graph=True)
    other.backward()


def of_inputs_twice(model: Broken, x: Tensor) -> None:
    one, other = losses_of(model, x)
    wanted = list(model.layers[2].parameters())
    one.backward(retain_graph=True, inputs=wanted)
    other.backward(inputs=[*wanted, model.heads[1].weight])
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def balanced(model: Broken, x: Tensor) -> None:
    """Weigh tasks by the norms of their gradients on what they share (GradNorm)."""
    losses = losses_of(model, x)
    shared = list(model.layers.parameters())
    of_tasks = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
    norms = [torch.stack([g.norm() for g in each]).norm() for each in of_tasks]
    (losses[0] / norms[0] + losses[1] / norms[1]).backward()


WAYS: list[Callable[[Broken, Tensor], None]] = [
    the_same_thrice, one_after_the_other, of_inputs_twice, balanced,
]  # fmt: skip


def trained(run: Run, way: Callable[[Broken, Tensor], None], dropout: float, norm: bool) -> None:
    model = Broken(dropout, norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.fit(model, optimizer=optimizer)
    for _ in range(run.steps):
        way(model, torch.randn(256, WIDTH))
        optimizer.step()
        optimizer.zero_grad()
        run.note(torch.rand(()))
    run.trained(model)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dropout, norm", [(0.0, False), (0.3, True)], ids=["plain", "draws"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_backward_has_the_bits_of_plain_pytorch(
    way: Callable[[Broken, Tensor], None], dropout: float, norm: bool
) -> None:
    def lived(budget_bytes: int | None) -> Any:
        around = Run(budget_bytes, steps=4, small=True, costs="unit")
        return live(lambda run: trained(run, way, dropout, norm), around)

    plain = lived(None)
    fitted = lived(plain.whole_bytes)
    assert_trained_alike(plain, fitted)


# -- a backward that is differentiated itself -------------------------------------------------


def slope(output: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)[0]


class Critic(Broken):
    """One number of each row."""

    def forward(self, x: Tensor) -> Any:
        return self.heads[1](self.trunk(x))[:, :1]


def gradient_penalty(model: Critic, x: Tensor) -> Tensor:
    between = (0.3 * x + 0.7 * x.flip(0)).requires_grad_()
    truth, lie = model(x), model(x.flip(0))
    steep = slope(model(between), between).norm(2, dim=1)
    return lie.mean() - truth.mean() + 10 * ((steep - 1) ** 2).mean()


def second_derivative(model: Critic, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    along = slope(model(x), x)
    return slope(along.square().sum(), x).square().mean() + along.square().mean()


def slopes_of_weights(model: Critic, x: Tensor) -> Tensor:
    output = model(x)
    weights = [model.layers[0].weight, model.layers[3].weight]
    first = torch.autograd.grad(output.sum(), weights, create_graph=True)
    return torch.stack([g.square().sum() for g in first]).sum()


@pytest.mark.parametrize("way", [gradient_penalty, second_derivative, slopes_of_weights])
def test_a_derivative_has_the_bits_of_plain_pytorch(
    way: Callable[[Critic, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    plain = Critic()
    found = []
    for model in (plain, tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        own: list[Tensor] = []
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss = way(model, torch.randn(32, WIDTH))
            loss.backward()
            own += [
                loss.detach(),
                *(p.grad.clone() for p in model.parameters() if p.grad is not None),
            ]
            optimizer.step()
        found.append(own)
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


class Derives(nn.Module):
    """Takes derivatives of a layer inside of its forward."""

    def __init__(self, way: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.first(x))
        return self.way(lambda u: torch.tanh(self.inner(u)).square(), rows[0]).square().sum()


def jacobian(function: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(function, u, create_graph=True)


def hessian(function: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    return torch.autograd.functional.hessian(lambda v: function(v).sum(), u, create_graph=True)


def vjp(function: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    return torch.autograd.functional.vjp(function, u, torch.ones(8), create_graph=True)[1]


def jvp(function: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    return torch.autograd.functional.jvp(function, u, torch.ones(8), create_graph=True)[1]


def constant(function: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    return function(u) * torch.autograd.functional.jacobian(function, u).sum(0)


@pytest.mark.parametrize("way", [jacobian, hessian, vjp, jvp, constant])
def test_derivatives_inside_of_a_forward(way: Any) -> None:
    torch.manual_seed(0)
    plain = Derives(way)
    found = []
    for model in (plain, tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)):
        own = []
        for seed in range(3):
            torch.manual_seed(seed)
            model.zero_grad()
            loss = model(torch.randn(4, 8))
            loss.backward()
            own += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        found.append(own)
    assert all(map(torch.equal, *found))


# -- what it is run on, and what it is refused for ---------------------------------------------


class BreakBefore(nn.Module):
    """Its second graph begins with an operator whose kept input is not read."""

    def __init__(self, in_place: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.in_place, self.drop = in_place, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        print(end="")
        return self.second(self.drop(torch.nn.functional.relu(hidden, inplace=self.in_place)))


class TwoOutputs(BreakBefore):
    """Returns what its first graph and what its second one computes."""

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        print(end="")
        further = self.drop(torch.tanh(self.second(hidden)))
        return further.square().mean(), 2 * further, hidden


def retained(model: nn.Module, step: int) -> None:
    loss = model(torch.randn(16, 8)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def retained_at_times(model: nn.Module, step: int) -> None:
    loss = model(torch.randn(16, 8)).square().sum()
    loss.backward(retain_graph=step % 3 == 2)
    if step % 3 == 2:
        loss.backward()


def penalty_at_times(model: nn.Module, step: int) -> None:
    """As StyleGAN2 does: the penalty is computed in some steps only."""
    x = torch.randn(16, 8).requires_grad_()
    loss = model(x).square().mean()
    if step % 3 == 2:
        loss = loss + slope(model(x), x).square().sum()
    loss.backward()


def takes_more_from_the_fourth_on(model: nn.Module, step: int) -> None:
    loss, further, _ = model(torch.randn(16, 8))
    (loss + further.mean() if step > 3 else loss).backward()


def lived(plain: nn.Module, step: Callable[[nn.Module, int], None], steps: int) -> list[Any]:
    """Return what plain and fitted steps show."""
    found = []
    for model in (plain, tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)):
        own: list[Tensor] = []
        for number in range(steps):
            torch.manual_seed(number)
            model.zero_grad()
            step(model, number)
            own += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            own.append(torch.rand(()))
        found.append(own)
    return found


@pytest.mark.parametrize(
    "plain, step",
    [
        (BreakBefore(), retained),
        (BreakBefore(in_place=True), retained),
        (BreakBefore(in_place=True, dropout=0.5), retained),
        (BreakBefore(), retained_at_times),
        (BreakBefore(dropout=0.5), retained_at_times),
        (BreakBefore(), penalty_at_times),
        (BreakBefore(dropout=0.5), penalty_at_times),
        (TwoOutputs(), takes_more_from_the_fourth_on),
    ],
    ids=[
        "retained",
        "in place",
        "draws",
        "at times",
        "draws, at times",
        "penalty at times",
        "draws, penalty at times",
        "late gradient",
    ],
)
def test_inputs_that_nobody_holds_are_made_again(
    plain: nn.Module, step: Callable[[nn.Module, int], None]
) -> None:
    expected, found = lived(plain, step, steps=7)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


def test_outputs_of_several_graphs_with_one_derivative_are_refused() -> None:
    model = tightfit.fit(TwoOutputs(), "1GiB", costs="unit", cache=False)
    x = torch.randn(16, 8).requires_grad_()
    loss, _, hidden = model(x)
    with pytest.raises(TightfitError, match=r"several graphs.*return their sum"):
        slope(loss + hidden.sum(), x)


def test_a_further_backward_that_finds_no_room_is_refused_in_words() -> None:
    model = tightfit.fit(Broken(), "2MiB", costs="unit", cache=False)
    loss = torch.stack(losses_of(model, torch.randn(512, WIDTH))).sum()
    loss.backward(retain_graph=True)
    held = [torch.empty(8 << 10) for _ in range(8)]
    with pytest.raises(tightfit.TightfitError, match=r"(retain_graph|least plan).*budget"):
        while True:
            held.append(torch.empty(8 << 10))
            loss.backward(retain_graph=True)
    assert held.pop() is not None


def test_calls_that_no_backward_follows_are_let_go_of() -> None:
    plain = BreakBefore()
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    retained(model, 0)
    meter = meter_for("cpu")
    held = []
    for _ in range(6):
        model(torch.randn(16, 8))
        held.append(meter.live_bytes())
    assert held[-1] == held[1]


def test_what_is_sharded_says_that_its_parameters_are_gone() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    options = make_options(1 << 20, costs="unit", limits=(1, 0.02), cache=False)
    attach_by_parts(model, {"0": model[0]}, options)
    loss = model(torch.randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(TightfitError, match=r"fully_shard.*not there any more.*call the model"):
        loss.backward()
