"""What people complained of upstream: shown with the plain tool at our pin, then with tightfit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import support.ddp
import tightfit
from support.ddp import Checkpointed
from support.processes import run_ranks
from tightfit.errors import InfeasibleBudget
from tightfit.session.handles import fitted_of


def images() -> torch.Tensor:
    return torch.randn(4, 3, 16, 16)


def test_batch_norm_is_updated_once():
    """pytorch #96136: recomputation updates the running statistics a second time."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    expected, x = copy.deepcopy(body), images()
    expected(x).square().mean().backward()
    plain = Checkpointed(copy.deepcopy(body))
    plain(x).square().mean().backward()
    assert plain.body[1].num_batches_tracked == 2

    step = tightfit.step(
        lambda x: body(x).square().mean(), modules=body, budget="1GiB", costs="unit", cache=False
    )
    least = fitted_of(step).smallest_budget((x,), {}).found_bytes
    fitted_of(step).change_budget(least)
    step(x).backward()
    assert tightfit.report(step).overhead > 0  # something was recomputed
    assert body[1].num_batches_tracked == 1
    assert torch.equal(body[1].running_var, expected[1].running_var)
    assert torch.equal(body[0].weight.grad, expected[0].weight.grad)


def test_infeasible_says_the_least_budget():
    """checkmate #144: 'infeasible', and no word of what would be feasible."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    x = torch.randn(32, 64)

    def step_within(budget):
        return tightfit.step(
            lambda x: model(x).sum(), modules=model, budget=budget, costs="unit", cache=False
        )

    with pytest.raises(InfeasibleBudget, match="least") as raised:
        step_within("100KiB")(x)
    assert raised.value.minimum_bytes is not None
    step_within(raised.value.minimum_bytes)(x).backward()


def test_the_budget_is_no_hint():
    """MegEngine #482: a threshold that is exceeded without a word."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tightfit.fit(model, "1MiB", optimizer=optimizer, costs="unit", cache=False)
    x = torch.randn(32, 64)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"the budget of \d+ bytes .* has no room"):
        torch.zeros(1 << 30)  # user code asks for 4 GiB between the steps
    optimizer.step()
    model(x).sum().backward()


def test_an_option_without_effect_is_seen():
    """transformers #28022: checkpointing that does nothing, and nothing that shows it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
    x = torch.randn(64, 64)  # requires no gradient: reentrant checkpoint cuts the graph
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert not checkpoint(model, x, use_reentrant=True).requires_grad

    step = tightfit.step(
        lambda x: model(x).square().mean(), modules=model, budget="1GiB", costs="unit", cache=False
    )
    for _ in range(2):
        step(x).backward()
    everything = tightfit.report(step)
    least = fitted_of(step).smallest_budget((x,), {}).found_bytes
    fitted_of(step).change_budget(least)
    step(x).backward()
    fitted_of(step).close_step()
    tight = tightfit.report(step)
    assert tight.planned_peak_bytes < everything.planned_peak_bytes
    assert tight.overhead > everything.overhead
    assert all(p.grad is not None for p in model.parameters())


def test_no_parameter_is_ready_twice_with_ddp():
    """transformers #23018: 'marked as ready twice' with checkpointing under DDP."""
    assert any("ready only once" in text for text in run_ranks(support.ddp, "plain"))
    assert run_ranks(support.ddp, "fitted") == []
