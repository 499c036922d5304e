"""Backwards of one call that share no saved tensor follow each other without retain_graph."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from benchmarks.training_loops import Run, live
from support.lives import assert_trained_alike
from tightfit.errors import TightfitError


class ActorCritic(nn.Module):
    """Two networks in one module, with a layer in common if asked for."""

    def __init__(self, *, trunk: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(32, 32) if trunk else nn.Identity()
        self.actor, self.critic = self._network(5), self._network(1)

    def _network(self, width: int) -> nn.Sequential:
        norm, dropout = nn.BatchNorm1d(64), nn.Dropout(0.2)
        return nn.Sequential(
            nn.Linear(32, 64), norm, nn.GELU(), dropout, nn.Linear(64, 64), nn.GELU(),
            nn.Linear(64, width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.trunk(x)
        return [self.actor(hidden), self.critic(hidden)]


Training = Callable[[ActorCritic, list[Tensor], int], None]


def a_step_each(model: ActorCritic, losses: list[Tensor], number: int) -> None:
    """Change what the first backward has read before the second comes."""
    for network, loss in zip((model.actor, model.critic), losses, strict=True):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def one_step(model: ActorCritic, losses: list[Tensor], number: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    for loss in losses:
        loss.backward()
    optimizer.step()


def gradients_of_a_head(model: ActorCritic, losses: list[Tensor], number: int) -> None:
    """Free the saved tensors of one layer only, behind which both backwards meet."""
    head = list(model.actor[-1].parameters())
    for parameter, gradient in zip(head, torch.autograd.grad(losses[0], head), strict=True):
        parameter.data -= 0.1 * gradient
    one_step(model, losses[1:], number)


def in_turns(model: ActorCritic, losses: list[Tensor], number: int) -> None:
    one_step(model, [losses[number % 2]], number)


@pytest.mark.parametrize("trunk", [False, True], ids=["apart", "a layer in common"])
@pytest.mark.parametrize(
    "training",
    [a_step_each, one_step, gradients_of_a_head, in_turns],
    ids=lambda training: training.__name__,
)
def test_what_plain_pytorch_does_is_done_and_what_it_refuses_is_refused(
    training: Training, trunk: bool
) -> None:
    refused = trunk and training in (a_step_each, one_step)

    def trained(run: Run) -> None:
        model = ActorCritic(trunk=trunk)
        run.fit(model)
        for number in range(run.steps):
            actions, values = model(torch.randn(256, 32))
            losses = [F.cross_entropy(actions, torch.randint(5, (256,))), values.square().mean()]
            del actions, values
            if refused:
                with pytest.raises((RuntimeError, TightfitError), match="a second time"):
                    training(model, losses, number)
                break
            training(model, losses, number)
            run.note(losses[0] + losses[1], torch.rand(1).item())
            del losses
        run.trained(model)

    plain = live(trained, Run(None, steps=4, small=True, costs="unit"))
    fitted = live(trained, Run(plain.whole_bytes, steps=4, small=True, costs="unit"))
    assert_trained_alike(plain, fitted)


def test_what_runs_again_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = tightfit.fit(ActorCritic(), "1GiB", costs="unit", cache=False)
    for number in range(3):
        one_step(model, [y.square().mean() for y in model(torch.randn(8, 32))], number)
    assert capsys.readouterr().err.count("several backwards go through one call") == 1


def test_a_parameter_that_both_read_is_not_to_change() -> None:
    """Plain PyTorch reads no saved tensor that has changed; the forward would read the weight."""
    model = ActorCritic()
    model.critic[0].weight = model.actor[0].weight
    tightfit.fit(model, "1GiB", costs="unit", cache=False)
    losses = [y.square().mean() for y in model(torch.randn(8, 32))]
    with pytest.raises(TightfitError, match="was changed since the call"):
        a_step_each(model, losses, 0)


class Drawn(nn.Module):
    """Random operators on two inputs, with one to three outputs."""

    def __init__(self, draws: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        kinds = ["layer", "layer", "relu", "tanh", "product", "sum", "norm", "view", "both"]
        self.ops = [
            (draws.choice(kinds), draws.randrange(n), draws.randrange(n), draws.randrange(4))
            for n in range(2, draws.randint(5, 9))
        ]
        made = range(2, 2 + len(self.ops))
        self.outputs = draws.sample(made, k=min(len(made), draws.randint(1, 3)))

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        values = [x, y]
        for kind, one, other, layer in self.ops:
            values.append(self._made(kind, values[one], values[other], layer))
        return [values[i].square() for i in self.outputs]

    def _made(self, kind: str, a: Tensor, b: Tensor, layer: int) -> Tensor:
        match kind:
            case "layer":
                return self.layers[layer](a)
            case "product":
                return a * b
            case "sum":
                return a + b
            case "view":
                return a.reshape(3, -1).reshape(6, 6)
            case "both":
                return torch.cat([a[:2], b[2:]])
            case _:
                return {"relu": torch.relu, "tanh": torch.tanh, "norm": self.norm}[kind](a)


def differentiated(model: Drawn, seed: int) -> list[Tensor | None] | str:
    """Go back one to three times, for some gradients of some outputs; return all, or the error."""
    draws, found = random.Random(seed), []
    torch.manual_seed(seed)
    x, y = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6)
    owners = [x, *model.parameters()]
    outputs = model(x, y)
    try:
        for _ in range(draws.randint(1, 3)):
            chosen = draws.sample(outputs, k=draws.randint(1, len(outputs)))
            loss, keeps = torch.stack([x.sum() for x in chosen]).sum(), draws.random() < 0.5
            some = draws.sample(owners, k=draws.randint(1, 3))
            if draws.random() < 0.5:
                loss.backward(retain_graph=keeps)
            else:
                found += torch.autograd.grad(loss, some, retain_graph=keeps, allow_unused=True)
    except (RuntimeError, TightfitError) as error:
        return "second time" if "a second time" in str(error) else repr(error)
    return [*found, *(owner.grad for owner in owners)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seed", range(60))
def test_random_backwards_are_those_of_plain_pytorch(seed: int) -> None:
    model = Drawn(random.Random(seed))
    fitted = tightfit.fit(copy.deepcopy(model), "1GiB", costs="unit", cache=False)
    expected, found = differentiated(model, seed), differentiated(fitted, seed)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
        return
    for one, other in zip(expected, found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # pyright: ignore
