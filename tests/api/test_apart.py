"""Backwards of one call that share no saved tensor follow each other without retain_graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from benchmarks.training_loops import Run, live
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
    assert not fitted.error
    assert fitted.losses == plain.losses and fitted.parameters == plain.parameters
    assert fitted.largest_bytes <= (fitted.budget_bytes or 0)


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
