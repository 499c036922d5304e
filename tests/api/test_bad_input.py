"""What cannot work is refused with one message, and the user's model stays as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import (
    BadInput,
    InfeasibleBudget,
    InvalidPlan,
    PlanMismatch,
)
from tightfit.plan.io import save_plan

QUICK = {"costs": "unit", "limits": (0.5, 0.01)}


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 6)
    )


def state_of(model: nn.Module) -> list[Any]:
    """Return everything of a model and the generators that a failure might have changed."""
    tensors = [t.clone() for t in model.state_dict().values()]
    gradients = [p.grad for p in model.parameters()]
    flags = [(name, m.training, sorted(m.__dict__)) for name, m in model.named_modules()]
    return [tensors, gradients, flags, torch.get_rng_state(), random.getstate()]


def assert_same(before: list[Any], after: list[Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1:3] == after[1:3] and before[4] == after[4]
    assert torch.equal(before[3], after[3])


def plan_of(model: nn.Module) -> tightfit.Report:
    tightfit.fit(model, "1MiB", optimizer=torch.optim.SGD(model.parameters()), **QUICK)
    return tightfit.prepare(model, torch.ones(4, 6))


FAILURES: list[tuple[str, dict[str, Any], torch.Tensor, type[Exception], str]] = [
    ("too small", {"budget": "700B"}, torch.ones(4, 6), InfeasibleBudget, "no plan of Sequential"),
    # as in plain PyTorch
    ("wrong shape", {"budget": "1MiB"}, torch.ones(4, 5), RuntimeError, "be multiplied"),
    ("wrong type", {"budget": "1MiB"}, torch.ones(4, 6).int(), RuntimeError, "same dtype"),
    ("all reserved", {"budget": "1MiB", "reserve": "1MiB"}, torch.ones(4, 6), BadInput, "reserve"),
    ("no device", {"budget": "device"}, torch.ones(4, 6), BadInput, "on a CPU give bytes"),
]


@pytest.mark.parametrize(
    ("options", "inputs", "error", "message"),
    [pytest.param(*rest, id=name) for name, *rest in FAILURES],
)
def test_a_failed_step_leaves_the_model_as_it_was(options, inputs, error, message) -> None:
    model = network()
    plain = copy.deepcopy(model)
    tightfit.fit(model, **options, **QUICK)
    before = state_of(model)
    with pytest.raises(error, match=message):
        model(inputs)
    assert_same(before, state_of(model))
    tightfit.unfit(model)
    assert_same(state_of(plain), state_of(model))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Called(nn.Module):
    """Runs without a forward."""

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: tightfit.fit(Called(), "1MiB"), "name that __call__ forward"),
        (lambda m: tightfit.fit(m, "many"), "cannot read the budget 'many'"),
        (lambda m: tightfit.fit(m, "8"), "has no unit"),
        (lambda m: tightfit.fit(m, "-1GiB"), "must be positive"),
        (lambda m: tightfit.fit(m, 1.5), "must be bytes as an int or text"),
        (lambda m: tightfit.fit(m, "1MiB", planner="oracle"), "oracle"),
        (lambda m: tightfit.fit(m, "1MiB", costs="guesses"), r"'guesses' \(known: measured, unit"),
        (lambda m: tightfit.fit(m, "1MiB", on_exceed="pray"), "on_exceed must be"),
        (lambda m: tightfit.fit(m, "1MiB", in_flight=0), "in_flight must be"),
        (lambda m: tightfit.fit(m, "1MiB", in_flight=True), "in_flight must be"),
        (lambda m: tightfit.fit(m, "1MiB", limits=3), r"limits must be \(seconds, gap\)"),
        (lambda m: tightfit.fit(m, "1MiB", limits=(-1, 0)), r"limits must be \(seconds, gap\)"),
        (lambda m: tightfit.fit(m, "1MiB", optimizer="sgd"), "must be a torch optimizer, got str"),
        (
            lambda m: tightfit.fit(m, "1MiB", optimizer=[sgd(m), sgd(m)]),
            "with several, leave it out",
        ),
        (lambda m: tightfit.fit(m, "1MiB", exactness="exact"), "exactness 'exact'"),
        (lambda m: tightfit.fit(m.forward, "1MiB"), r"use tightfit\.step\("),
        (lambda m: tightfit.fit(m, "1MiB", plan="none.json"), r"cannot read none\.json"),
        (lambda m: tightfit.step(m, modules=[], budget="1MiB"), "modules= must be"),
        (lambda m: tightfit.step(3, modules=m, budget="1MiB"), "takes a callable, got int"),
        (tightfit.report, "neither a fitted model nor a step"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(
    call: Callable[[nn.Module], Any], message: str
) -> None:
    model = network()
    before = state_of(model)
    with pytest.raises(BadInput, match=message):
        call(model)
    assert_same(before, state_of(model))


def test_an_optimizer_of_another_model_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    tightfit.fit(network(), "1MiB", optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))
    assert "holds none of its" in capsys.readouterr().err


def test_a_given_plan_is_verified_first(tmp_path: Path) -> None:
    plan = plan_of(network()).plan
    save_plan(plan, tmp_path / "plan.json")
    same = tightfit.fit(network(), "1MiB", plan=tmp_path / "plan.json", **QUICK)
    assert tightfit.prepare(same, torch.ones(4, 6)).plan.instructions == plan.instructions
    other = tightfit.fit(network(width=9), "1MiB", plan=plan, **QUICK)
    with pytest.raises(PlanMismatch, match=r"was made for the graph .* plan again"):
        other(torch.ones(4, 6))
    smaller = tightfit.fit(network(), "2KiB", plan=plan, **QUICK)
    with pytest.raises(InvalidPlan, match="budget"):
        tightfit.prepare(smaller, torch.ones(4, 6))


def test_a_model_that_does_not_run_is_named_by_prove() -> None:
    with pytest.raises(BadInput, match=r"does not run with plain PyTorch: RuntimeError.*shapes"):
        tightfit.prove((network(), None, (torch.ones(4, 5),), None), budget_ratio=0.5)


class Particular(nn.Sequential):
    def forward(self, x):
        if len(x) == 3:
            raise ValueError("no batch of three")
        return super().forward(x)


def test_errors_of_the_model_itself_are_unchanged():
    model = tightfit.fit(Particular(nn.Linear(8, 4)), "1GiB", costs="unit")
    with pytest.raises(ValueError, match="no batch of three"):
        model(torch.ones(3, 8))
    with pytest.raises(TypeError, match="missing 1 required"):
        model()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(4, 9))
    model(torch.ones(4, 8)).sum().backward()
    assert tightfit.report(model).planned_peak_bytes


class Decides(nn.Module):
    """What it has computed decides what it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x * 2 if x.sum().item() > 3 else x


def test_computed_values_may_decide_which_code_runs() -> None:
    plain = Decides()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")
    for scale in (1.0, 10.0, -10.0):
        x = scale * torch.randn(4, 8)
        for model in (plain, fitted):
            model(x).sum().backward()
        assert torch.equal(plain.layer.weight.grad, fitted.layer.weight.grad)
