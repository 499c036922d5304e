"""Where a budget has no room, saved tensors of calls that wait are freed before it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from benchmarks.training_loops import Run, live
from tightfit.allocator.tally import free_for
from tightfit.errors import TightfitError

_TOLD = "The backward begins with its forward, run once more"  # once for each model


def network(blocks: int = 4) -> nn.Module:
    """It draws random numbers, and changes buffers."""
    block = lambda: (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1))  # noqa: E731
    return nn.Sequential(*(layer for _ in range(blocks) for layer in block()))


def several_calls(run: Run) -> None:
    """Four forwards before a backward: the first does not know of the others."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.fit(model, optimizer=optimizer)
    for _ in range(run.steps):
        losses = [model(torch.randn(512, 64)).square().mean() for _ in range(4)]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        run.note(*losses)
    run.trained(model)


def loss_outside(run: Run) -> None:
    """A loss that keeps much more than the model does."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.fit(model, optimizer=optimizer)
    for _ in range(run.steps):
        z = F.normalize(model(torch.randn(512, 64)))
        loss = F.cross_entropy(z @ z.T / 0.1, torch.arange(512))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(model)


def two_models(run: Run) -> None:
    """A model is called, and another, which takes its output and its own data, before that."""
    make, judge = network(8), network(3)
    makes = torch.optim.SGD(make.parameters(), lr=0.1)
    judges = torch.optim.SGD(judge.parameters(), lr=0.1)
    budget = run.budget()
    run.fit(make, budget, optimizer=makes)
    run.fit(judge, budget, optimizer=judges)
    for _ in range(run.steps):
        made = make(torch.randn(512, 64))
        judges.zero_grad()
        judged = (judge(torch.randn(512, 64)) - judge(made.detach())).mean()
        judged.backward()
        judges.step()
        makes.zero_grad()
        loss = judge(made).square().mean()
        loss.backward()
        makes.step()
        run.note(judged, loss)
    run.trained(make, judge)


@pytest.mark.parametrize(
    ("loop", "share"), [(several_calls, 0.195), (loss_outside, 0.8), (two_models, 0.205)]
)
def test_a_step_trains_that_would_be_refused(
    loop: Callable[[Run], None], share: float, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = live(loop, Run(None, steps=5, small=True))
    budget_bytes = int(share * plain.whole_bytes)
    options = {"costs": "unit", "cache": False}  # where times decide, a plan may need nothing freed
    fitted = live(loop, Run(budget_bytes, steps=5, small=True, **options))
    assert not fitted.error
    assert (fitted.losses, fitted.parameters) == (plain.losses, plain.parameters)
    assert fitted.largest_bytes <= (fitted.budget_bytes or 0)
    assert capfd.readouterr().err.count(_TOLD) in (1, 2)


def waiting() -> tuple[nn.Module, Tensor]:
    """A model whose call awaits its backward, with its saved tensors freed; its loss."""
    torch.manual_seed(0)
    model = tightfit.fit(network(), "1GiB", costs="unit", cache=False)
    loss = model(torch.randn(64, 64)).square().mean()
    assert free_for(1, torch.device("cpu")) > 0
    assert free_for(1, torch.device("cpu")) == 0  # nothing is left
    return model, loss


def test_what_cannot_be_run_once_more_says_so() -> None:
    model, loss = waiting()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(TightfitError, match=r"(?s)freed to keep to the budget.*larger budget"):
        loss.backward()


def test_an_evaluation_meanwhile_changes_nothing() -> None:
    torch.manual_seed(0)
    plain = network()
    model, loss = waiting()
    expected = copy.deepcopy(plain)
    torch.manual_seed(0)
    network()
    expected(torch.randn(64, 64)).square().mean().backward()
    torch.manual_seed(3)
    with torch.no_grad():
        model.eval()(torch.ones(2, 64))
    model.train()
    loss.backward()
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
