"""A budget of what plain PyTorch takes is never refused, also where Dynamo breaks the model."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tightfit
from benchmarks.training_loops import Life, Run, live, loop_named
from tightfit.allocator.tally import free_for

_STEPS = 6  # after four, Dynamo leaves a forward alone that is another graph in every call


def lived(loop: Callable[[Run], None], budget_bytes: int | None) -> Life:
    gc.collect()
    return live(loop, Run(budget_bytes, steps=_STEPS, small=True, cache=False))


def assert_holds_at_plain(loop: Callable[[Run], None]) -> None:
    """Within what plain PyTorch takes it trains alike; within less nothing wrong is proven."""
    plain = lived(loop, None)
    fitted = lived(loop, plain.whole_bytes)
    assert fitted.error == ""
    assert (fitted.losses, fitted.parameters) == (plain.losses, plain.parameters)
    assert fitted.budget_bytes is not None and fitted.largest_bytes <= fitted.budget_bytes
    less = lived(loop, plain.whole_bytes * 7 // 10)
    proven = [int(n) for n in re.findall(r"proven: none fits less than (\d+)", less.error)]
    assert all(number <= plain.whole_bytes for number in proven), less.error
    if not less.error:
        assert (less.losses, less.parameters) == (plain.losses, plain.parameters)


@pytest.mark.parametrize(
    "name",
    [
        "branch_on_value",
        "early_stopping",
        "function_in_break",
        "calls_summed",
        "cleared_between",
        "outputs_kept",
        "second_model",
    ],
)
def test_models_in_several_graphs(name: str) -> None:
    assert_holds_at_plain(loop_named(name).function)


@pytest.mark.parametrize("seed", [0, 2, 6, 10, 17, 26])
def test_loops_drawn_at_random(seed: int) -> None:
    """With 6 more is expected at the begin of a step; with 17 two models have one budget."""
    assert_holds_at_plain(loop_named(f"drawn_in_graphs_{seed}").function)


@pytest.mark.parametrize(("name", "share"), [("branch_on_value", 0.78), ("cleared_between", 0.97)])
def test_least_plans_without_room_for_what_may_be_there(name: str, share: float) -> None:
    """A state that is to come, or gradients that are cleared before the backward."""
    loop = loop_named(name).function
    plain = lived(loop, None)
    fitted = lived(loop, int(share * plain.whole_bytes))
    assert fitted.error == ""
    assert (fitted.losses, fitted.parameters) == (plain.losses, plain.parameters)


def test_a_recurrence_whose_graphs_change() -> None:
    """After some steps its parts are others, and there is no room to measure the recurrence."""
    loop = loop_named("lstm_logged").function
    plain = lived(loop, None)
    fitted = lived(loop, plain.whole_bytes)
    assert fitted.error == ""
    assert (fitted.losses, fitted.parameters) == (plain.losses, plain.parameters)


class _InGraphs(nn.Module):
    """Looks at a value between layers that draw random numbers and change buffers."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1))  # noqa: E731
        self.first, self.last = nn.Sequential(*block(), *block()), nn.Sequential(*block(), *block())
        self.between = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = 1.0 if x.detach().mean().item() > -9 else 0.5
        self.between()
        return self.last(x * scale)


def free_what_waits() -> None:
    assert free_for(1 << 30, torch.device("cpu")) > 0


@pytest.mark.parametrize("is_between", [False, True])
def test_saved_tensors_of_waiting_parts_are_freed(is_between: bool) -> None:
    """The backward of each part begins with its forward, run once more: the same gradients.

    Freed between two parts, the first runs once more after the second has changed its buffers.
    """
    torch.manual_seed(0)
    plain = _InGraphs()
    model = copy.deepcopy(plain)
    if is_between:
        model.between = torch.compiler.disable(free_what_waits)
    tightfit.fit(model, "1GiB", costs="unit", cache=False)
    x = torch.randn(256, 64)
    for step in range(3):
        results: list[list[Tensor]] = []
        for own in (plain, model):
            torch.manual_seed(step)
            loss = own(x).square().mean()
            if own is model and not is_between:
                free_what_waits()
            loss.backward()
            grads = [p.grad for p in own.parameters() if p.grad is not None]
            results.append([loss, *map(torch.clone, grads), *own.buffers()])
            own.zero_grad()
        assert all(map(torch.equal, *results))
