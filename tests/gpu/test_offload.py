"""`offload=` on a GPU: pinned memory, copied by streams; ``pytest -m gpu``."""

from __future__ import annotations

import contextlib
import copy
import gc
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from support.deep import Deep
from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.execution.attach import attached

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
WIDTH, ROWS = 1024, 16384  # 64 MiB a value
STEPS = 8
SHARES = (0.9, 1.0)
"""Of the least budget without moves, constants left out: the least that a plan fits is taken."""
ANY_PLAN = (10, 1.0)


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.randn(ROWS, WIDTH, device=DEVICE)


class Training:
    """A model and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def steps(self, number: int = STEPS) -> list[torch.Tensor]:
        """Take steps; return the losses. Nothing waits for the device meanwhile."""
        losses = []
        for step in range(number):
            loss = self.model(batch(step))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses


def assert_same(one: Training, other: Training) -> None:
    pairs = zip(*(t.model.state_dict().values() for t in (one, other)), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Deep(width=WIDTH).to(DEVICE)


@pytest.fixture(scope="module")
def budgets(model: nn.Module) -> list[int]:
    """Return budgets around the least without moves, at which moves pay off or are needed."""
    mine = Training(copy.deepcopy(model))
    tightfit.fit(mine.model, "16GiB", optimizer=mine.optimizer, cache=False, limits=(3, 0.01))
    constant_bytes = tightfit.prepare(mine.model, batch(0)).constant_bytes
    least_bytes = attached(mine.model).smallest_budget((batch(0),), {}).found_bytes
    tightfit.unfit(mine.model)
    return [constant_bytes + int(share * (least_bytes - constant_bytes)) for share in SHARES]


def fitted(model: nn.Module, budgets: list[int]) -> Training:
    """Return a training within the least of some budgets that a plan fits."""
    for budget in budgets:
        mine = Training(copy.deepcopy(model))
        keywords: dict[str, Any] = {"offload": "4GiB", "cache": False, "limits": ANY_PLAN}
        tightfit.fit(mine.model, budget, optimizer=mine.optimizer, **keywords)
        try:
            tightfit.prepare(mine.model, batch(0))
        except InfeasibleBudget:
            tightfit.unfit(mine.model)
            continue
        return mine
    return pytest.fail("no plan fits, with moves either")


def side_stream() -> AbstractContextManager[Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


@pytest.mark.parametrize("around", [contextlib.nullcontext, side_stream])
def test_bits_are_equal_and_the_budget_holds(
    model: nn.Module, budgets: list[int], around: Any
) -> None:
    with around():
        plain = Training(copy.deepcopy(model))
        expected = plain.steps()  # before there is a limit
        mine = fitted(model, budgets)
        found = mine.steps()
        torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))
    assert_same(mine, plain)
    session = attached(mine.model)
    session.close_step()
    assert all(s.peak_bytes <= session.options.budget_bytes for s in session.guard.steps)
    report = tightfit.report(mine.model)
    planned, moved = report.moves, report.measured_moves
    assert planned is not None and moved is not None
    # Plans count each value in units of 512 bytes
    assert 0.99 * planned.stored_bytes <= moved.stored_bytes <= planned.stored_bytes
    assert 0.99 * planned.loaded_bytes <= moved.loaded_bytes <= planned.loaded_bytes
    assert moved.stored_bytes > 0 and moved.stall_s > 0
    tightfit.unfit(mine.model)


def test_a_backward_that_fails_leaves_the_next_step_right(
    model: nn.Module, budgets: list[int]
) -> None:
    plain = Training(copy.deepcopy(model))
    plain.steps(2)
    for number in (9, 10):  # running statistics are those of these calls, too
        plain.model(batch(number))
    expected = plain.steps(3)
    mine = fitted(model, budgets)
    mine.steps(2)
    calls = []

    def fails(gradient: torch.Tensor) -> None:
        calls.append(gradient.shape)
        raise RuntimeError("a hook that fails")

    hook = mine.model.get_submodule("layers.4").weight.register_hook(fails)
    with pytest.raises(RuntimeError, match="a hook that fails"):
        mine.model(batch(9)).backward()
    hook.remove()
    assert len(calls) == 1
    mine.optimizer.zero_grad()
    mine.model(batch(10))  # a call whose backward never comes
    gc.collect()
    assert all(map(torch.equal, mine.steps(3), expected))
    assert_same(mine, plain)
    tightfit.unfit(mine.model)


def test_what_a_gpu_does_not_have_is_refused(tmp_path: Any) -> None:
    model = nn.Linear(64, 64).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    far = tightfit.Offload("1GiB", folder=tmp_path)
    tightfit.fit(model, "1GiB", offload=far)
    with pytest.raises(BadInput, match=r"Offload\(folder=\.\.\.\) does not go with"):
        model(torch.randn(8, 64, device=DEVICE))
    tightfit.unfit(model)
    far = tightfit.Offload("1GiB", optimizer_state=True)
    with pytest.raises(BadInput, match=r"Offload\(optimizer_state=True\) does not go with"):
        tightfit.fit(model, "1GiB", optimizer=optimizer, update_in_backward=True, offload=far)
