"""Steps of several models, each within a budget of its own, that lie within each other."""

from __future__ import annotations

import pytest
import torch

from tightfit.errors import BudgetExceeded
from tightfit.execution.guard import Guard

KIB = 1 << 10


def begun(budget_bytes: int) -> Guard:
    """Return a guard whose forward program has just ended."""
    guard = Guard("cpu", "raise")
    if guard.meter is None:
        pytest.skip("peaks are not measured in this process")
    guard.before_forward(lambda: 0, budget_bytes)
    guard.after_forward()
    return guard


def held(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def backward(guard: Guard) -> None:
    guard.before_backward()
    guard.after_backward()


def test_what_another_model_holds_meanwhile_is_within_both_budgets() -> None:
    outer = begun(100 * KIB)
    inner = begun(200 * KIB)
    tensor = held(250)
    backward(inner)
    del tensor
    backward(outer)
    assert outer.close().beside_bytes == 200 * KIB
    assert inner.close().beside_bytes == 100 * KIB


def test_more_than_both_is_too_much() -> None:
    outer, inner = begun(100 * KIB), begun(200 * KIB)
    tensor = held(350)
    backward(inner)
    del tensor
    backward(outer)
    with pytest.raises(BudgetExceeded):
        inner.close()


def test_who_trains_after_another_keeps_to_the_own_budget() -> None:
    first = begun(100 * KIB)
    backward(first)
    second = begun(200 * KIB)
    tensor = held(150)
    backward(second)
    del tensor
    assert first.close().peak_bytes < 100 * KIB
    assert second.close().beside_bytes == 0


def test_a_backward_that_comes_after_that_of_another_is_not_part_of_it() -> None:
    outer, inner = begun(100 * KIB), begun(200 * KIB)
    backward(inner)
    outer.before_backward()
    tensor = held(350)
    del tensor
    outer.after_backward()
    assert inner.close().peak_bytes < 100 * KIB
