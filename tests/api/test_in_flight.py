"""Several forwards before their backwards: all within one budget, in whichever order they end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tightfit
from benchmarks.training_loops import Life, Run, live
from tightfit.errors import BudgetExceeded, InfeasibleBudget
from tightfit.session.whole import call_shares

Backwards = Callable[[list[Tensor]], None]

ORDERS: dict[str, Backwards] = {
    "their sum": lambda losses: sum(losses[1:], losses[0]).backward(),
    "first comes first": lambda losses: [loss.backward() for loss in losses] and None,
    "last comes first": lambda losses: [loss.backward() for loss in losses[::-1]] and None,
}


def loop_of(
    calls: int, order: Backwards, set_to_none: bool, in_flight: int | None
) -> Callable[[Run], None]:
    """Return a loop that calls its model so often before a backward."""

    def loop(run: Run) -> None:
        layers = [layer for _ in range(6) for layer in (nn.Linear(48, 48), nn.GELU())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.fit(model, in_flight=in_flight)
        for _ in range(run.steps):
            views = [torch.randn(256, 48) for _ in range(calls)]
            losses = [model(view).square().mean() for view in views]
            optimizer.zero_grad(set_to_none=set_to_none)
            order(losses)
            optimizer.step()
            run.note(*losses)
        run.trained(model)

    return loop


def lived(loop: Callable[[Run], None], budget_bytes: int | None) -> Life:
    return live(loop, Run(budget_bytes, steps=5, small=True, cache=False))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("calls", "is_given", "set_to_none"),
    [(3, True, True), (2, True, False), (4, False, True)],
    ids=["given", "given, zeroed gradients", "found out"],
)
def test_all_calls_keep_to_one_budget(
    calls: int, is_given: bool, set_to_none: bool, order: str
) -> None:
    loop = loop_of(calls, ORDERS[order], set_to_none, calls if is_given else None)
    plain = lived(loop, None)
    fitted = lived(loop, int(0.6 * plain.whole_bytes))
    if fitted.advised_bytes is not None:
        assert fitted.advised_bytes < 0.85 * plain.whole_bytes
        fitted = lived(loop, fitted.advised_bytes)
    assert not fitted.error
    assert fitted.losses == plain.losses and fitted.parameters == plain.parameters
    assert fitted.budget_bytes is not None and fitted.largest_bytes <= fitted.budget_bytes


def test_refusals_name_the_budget() -> None:
    loop = loop_of(2, ORDERS["their sum"], True, 2)
    error = lived(loop, 300_000).error
    assert "that the budget of 292.97 KiB leaves it" in error


def test_the_budget_for_many_calls_is_found_in_few_steps():
    """How many calls will come is unknown: an advice has room for as many again."""
    loop = loop_of(8, ORDERS["their sum"], set_to_none=True, in_flight=None)
    budget, refused = 1 << 19, 0  # with room for the inputs, which the loop makes
    while (life := live(loop, Run(budget, steps=3, small=True, costs="unit"))).error:
        assert life.advised_bytes is not None and life.advised_bytes > budget, life.error
        budget, refused = life.advised_bytes, refused + 1
    assert refused <= 9  # 29 where an advice has room for the calls seen only


def test_growing_numbers_of_calls_are_not_announced_one_by_one(capfd) -> None:
    loop = loop_of(20, ORDERS["their sum"], set_to_none=True, in_flight=None)
    life = live(loop, Run(64 << 20, steps=1, small=True, costs="unit"))
    assert not life.error
    said = capfd.readouterr().err
    assert [f"has {n} planned calls" in said for n in (2, 4, 8, 16)] == [True] * 4
    assert said.count("open before a backward") == 4


def test_a_call_that_fits_alone_is_not_refused_for_others_that_might_have_come(monkeypatch) -> None:
    loop = loop_of(1, ORDERS["their sum"], set_to_none=True, in_flight=None)
    plain = lived(loop, None)
    monkeypatch.setattr(
        call_shares, "_fitting_calls", lambda room_bytes, found, input_bytes: 4
    )  # taken too lightly
    fitted = lived(loop, int(0.62 * plain.whole_bytes))
    assert not fitted.error
    assert fitted.losses == plain.losses


def test_following_the_advice_leads_to_a_budget_that_holds() -> None:
    """What one of three calls has of each further byte is a part: advice allows for that."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        images = (nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
        return nn.Sequential(*images, nn.Flatten(), nn.Linear(64 * 49, 128), nn.LayerNorm(128))

    def steps(model: nn.Module) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            anchor, same, other = (torch.randn(48, 1, 28, 28) for _ in range(3))
            outputs = model(anchor), model(same), model(other)
            nn.functional.triplet_margin_loss(*outputs).backward()
            optimizer.step()
            optimizer.zero_grad()

    budget = 9 << 20
    for _ in range(6):
        model = tightfit.fit(network(), budget, costs="unit", cache=False, limits=(1, 0.01))
        try:
            steps(model)
        except (InfeasibleBudget, BudgetExceeded) as error:
            is_planned = isinstance(error, InfeasibleBudget)
            advised = error.minimum_bytes if is_planned else error.measured_bytes
            assert advised > budget
            budget = advised
        else:
            return
    pytest.fail(f"a budget of {budget} bytes is not enough yet")
