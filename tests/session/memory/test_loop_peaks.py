"""The memory of code between steps: expected from a first batch, then as it was seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tightfit
from tightfit.allocator.tally import tally_for
from tightfit.errors import TightfitError
from tightfit.execution.guard import left_out
from tightfit.session.memory.loop_peaks import LoopPeaks

CPU = torch.device("cpu")
SAMPLE = 4 << 10  # bytes


def made_batch() -> torch.Tensor:
    """Make a batch as a DataLoader does: from a list of samples."""
    return torch.stack([torch.zeros(SAMPLE // 4) for _ in range(8)])


def takes(bytes_: int) -> None:
    torch.empty(bytes_, dtype=torch.uint8)


def test_a_batch_and_what_making_it_took_are_expected_until_more_is_seen() -> None:
    loop_peaks = LoopPeaks(CPU, tally_for(CPU, ()))
    batch = made_batch()
    loop_peaks.call_begins([batch, 3])
    assert loop_peaks.rise_bytes == 2 * batch.nbytes
    assert loop_peaks.needed_bytes == 0
    loop_peaks.step_begins(1000, lambda: True, lambda: 0)  # and makes the optimizer's state
    assert loop_peaks.needed_bytes == 1000 + 2 * batch.nbytes
    takes(5 * batch.nbytes)
    loop_peaks.call_begins([batch])
    assert loop_peaks.rise_bytes == 2 * batch.nbytes and loop_peaks.needed_bytes == 0
    loop_peaks.step_begins(1000, lambda: False, lambda: 0)
    takes(5 * batch.nbytes)
    loop_peaks.call_begins([batch])
    assert loop_peaks.rise_bytes == 5 * batch.nbytes


def test_what_was_counted_before_fit_is_looked_at() -> None:
    tally = tally_for(CPU, ())
    batch = made_batch()
    loop_peaks = LoopPeaks(CPU, tally)
    loop_peaks.call_begins([batch])
    assert loop_peaks.rise_bytes == 2 * batch.nbytes


def test_data_that_stays_and_its_making_are_not_expected_again() -> None:
    loop_peaks = LoopPeaks(CPU, tally_for(CPU, ()))
    data = torch.cat([torch.zeros(100, 100), torch.zeros(100, 100)])
    loop_peaks.call_begins([data[:10]])
    assert loop_peaks.rise_bytes == 0


def test_planning_and_steps_of_others_are_left_out() -> None:
    loop_peaks, other = LoopPeaks(CPU, tally_for(CPU, ())), LoopPeaks(CPU, tally_for(CPU, ()))
    loop_peaks.call_begins([])
    loop_peaks.step_begins(0, lambda: False, lambda: 0)
    takes(SAMPLE)
    with left_out():
        takes(4 * SAMPLE)
    other.call_begins([])
    takes(8 * SAMPLE)
    loop_peaks.call_begins([])
    assert loop_peaks.rise_bytes == SAMPLE


@pytest.mark.parametrize("is_told", [True, False])
def test_the_first_advice_has_room_to_make_the_next_batch(is_told: bool) -> None:
    """Plain PyTorch holds most while a batch is made, next to the one before."""

    def train(budget_bytes: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(SAMPLE // 4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keywords = {"optimizer": optimizer} if is_told else {}
        tightfit.fit(model, budget_bytes, cache=False, **keywords)
        for _ in range(4):
            batch = made_batch()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    with pytest.raises((TightfitError, RuntimeError), match="budget") as refused:
        train(20 * SAMPLE)
    named = refused.value.args[0]
    train(int(named.split("Try a budget of ")[1].split(" bytes")[0]))
