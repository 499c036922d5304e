"""Steps of several models, each within a budget of its own, that lie within each other."""

from __future__ import annotations

import pytest
import torch

from tightfit.errors import BudgetExceeded
from tightfit.execution import guard as guarding
from tightfit.execution.guard import Guard, StepPeaks
from tightfit.living import Living

KIB = 1 << 10


@pytest.fixture(autouse=True)
def no_steps_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know of no step that another test has left under way."""
    monkeypatch.setattr(guarding, "_GUARDS", Living())


class Step:
    """A step whose forward program has just ended."""

    def __init__(self, budget_bytes: int) -> None:
        self.is_open = True
        self.guard = Guard("cpu", "raise")
        if self.guard.meter is None:
            pytest.skip("peaks are not measured in this process")
        self.guard.before_forward(lambda: 0, budget_bytes, runs=[self])
        self.guard.after_forward()

    def backward(self, held_kib: int = 0) -> None:
        self.guard.before_backward()
        held(held_kib)
        self.guard.after_backward()
        self.is_open = False

    def close(self) -> StepPeaks:
        step = self.guard.close()
        assert step is not None
        return step


def held(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_what_another_model_holds_meanwhile_is_within_both_budgets() -> None:
    outer, inner = Step(100 * KIB), Step(200 * KIB)
    inner.backward(250)
    outer.backward()
    assert outer.close().other_budgets_bytes == 200 * KIB
    assert inner.close().other_budgets_bytes == 100 * KIB


def test_more_than_both_is_too_much() -> None:
    outer, inner = Step(100 * KIB), Step(200 * KIB)
    inner.backward(350)
    outer.backward()
    with pytest.raises(BudgetExceeded):
        inner.close()


def test_a_step_after_another_keeps_to_its_own_budget() -> None:
    first = Step(100 * KIB)
    first.backward()
    second = Step(200 * KIB)
    second.backward(150)
    assert first.close().peak_bytes < 100 * KIB
    assert second.close().other_budgets_bytes == 0


def test_a_dropped_forward_leaves_no_step_open() -> None:
    left = Step(100 * KIB)
    left.is_open = False
    other = Step(200 * KIB)
    other.backward(150)
    assert other.close().other_budgets_bytes == 0


def test_a_backward_that_comes_after_that_of_another_is_not_part_of_it() -> None:
    outer, inner = Step(100 * KIB), Step(200 * KIB)
    inner.backward()
    outer.backward(350)
    assert inner.close().peak_bytes < 100 * KIB


def test_of_a_step_within_that_of_another_which_runs_nothing_the_peaks_are_its_own() -> None:
    left = Step(100 * KIB)
    other = Step(200 * KIB)
    other.backward(150)
    assert other.close().others_ran is False
    left.backward()
    assert left.close().others_ran is True


def test_steps_that_take_turns_have_peaks_of_their_own() -> None:
    first = Step(100 * KIB)
    first.backward()
    second = Step(200 * KIB)
    second.backward()
    assert first.close().others_ran is False
    assert second.close().others_ran is False


def test_garbage_that_is_collected_in_the_forward_is_nothing_that_user_code_holds() -> None:
    guard, garbage = Guard("cpu", "raise"), [held(300)]
    guard.before_forward(lambda: 0, 100 * KIB)
    garbage.clear()
    guard.after_forward()
    guard.before_backward()
    guard.after_backward()
    step = guard.close()
    assert step is None or step.outside_bytes == 0


def test_saved_tensors_that_are_freed_for_user_code_hide_nothing_of_it() -> None:
    guard, saved = Guard("cpu", "raise"), list[torch.Tensor]()
    guard.before_forward(lambda: 0, 600 * KIB)
    saved.append(held(300))
    guard.after_forward()
    outside = held(200)
    saved.clear()
    guard.note_freed_saved(300 * KIB)
    more = held(150)
    guard.before_backward()
    guard.after_backward()
    step = guard.close()
    assert outside.nbytes + more.nbytes == 350 * KIB
    if step is None:
        pytest.skip("peaks are not measured in this process")
    assert 500 * KIB <= step.peak_bytes < 510 * KIB
    assert 350 * KIB <= step.outside_bytes <= 500 * KIB
    assert not step.has_freed_between


def test_garbage_that_is_collected_while_a_step_is_planned_hides_nothing_of_it() -> None:
    guard, garbage = Guard("cpu", "raise"), [held(300)]
    guard.before_forward(lambda: 0, 100 * KIB)
    garbage.clear()
    guard.leave_out_freed()
    held(50)
    guard.after_forward()
    step = guard.close()
    assert step is None or 50 * KIB <= step.forward_bytes < 60 * KIB


def test_what_user_code_held_is_known_once_the_backward_has_begun() -> None:
    step = Step(500 * KIB)
    kept = held(20)
    held(50)
    assert step.guard.open_step is None
    step.guard.before_backward()
    peaks = step.guard.open_step
    assert peaks is not None and peaks.outside_bytes == 70 * KIB
    assert peaks.left_bytes == kept.nbytes
    step.guard.after_backward()
    step.close()
    assert step.guard.open_step is None


def test_weights_from_before_there_was_a_meter_that_are_replaced_count_once() -> None:
    unmetered = [300 * KIB]
    guard = Guard("cpu", "raise", unmetered_bytes=lambda: unmetered[0])
    guard.before_forward(lambda: 300 * KIB, 350 * KIB)
    guard.after_forward()
    guard.before_backward()
    guard.after_backward()
    weights = held(300)  # in the place of the old ones, which no meter has seen
    unmetered[0] = 0
    step = guard.close()
    assert weights.nbytes == 300 * KIB
    assert step is None or step.peak_bytes < 310 * KIB
