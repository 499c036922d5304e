"""What an arena leaves of a budget to memory of the process other than tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from torch import nn

import tightfit
from tightfit.errors import InfeasibleBudget
from tightfit.session.addresses import Addresses
from tightfit.session.memory.account import Account
from tightfit.session.options import make_options

BUDGET = 64 << 20
OPTIONS = make_options(BUDGET, costs="unit", arena=True)


@pytest.fixture
def addresses() -> Iterator[Addresses]:
    layer = nn.Linear(8, 8)
    made = Addresses("layer", Account({"": layer}, None))
    yield made
    made.leave()


def test_some_is_left_before_the_first_step_and_measured_once(addresses: Addresses) -> None:
    assert addresses.plans_first(OPTIONS) and addresses.left_bytes == 0
    changed = addresses.measure((), OPTIONS)
    assert changed == dataclasses.replace(OPTIONS, left_bytes=addresses.left_bytes)
    assert 0 < addresses.left_bytes < BUDGET
    assert not addresses.plans_first(changed)
    assert addresses.measure((), changed) is changed


def test_nothing_is_left_of_a_budget_that_others_share(addresses: Addresses) -> None:
    shared = dataclasses.replace(OPTIONS, shared=tightfit.Budget(BUDGET))
    assert not addresses.plans_first(shared)
    assert addresses.measure((), shared) is shared and addresses.left_bytes == 0


def test_less_is_left_for_the_least_plan_by_as_much_as_that_lacks(addresses: Addresses) -> None:
    addresses.measure((), OPTIONS)
    left_bytes, limit_bytes = addresses.left_bytes, OPTIONS.limit_bytes
    lacking = InfeasibleBudget("none", budget_bytes=BUDGET, call_bytes=limit_bytes + 1000)
    assert addresses.leaving_less(OPTIONS, lacking).left_bytes == left_bytes - 1000
    assert addresses.leaving_less(OPTIONS, lacking).left_bytes == 0  # once was not enough
    with pytest.raises(InfeasibleBudget):
        addresses.leaving_less(OPTIONS, lacking)
