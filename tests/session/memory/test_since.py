"""What a loop has done since the last call, and the outputs that it still holds."""

from __future__ import annotations

import torch
from torch import nn

from tightfit.session.memory.account import Account
from tightfit.session.memory.since import SinceLastCall


def test_gradients_are_used_from_a_step_of_an_optimizer_to_the_next_backward() -> None:
    since = SinceLastCall()
    assert not since.has_stepped and not since.gradients_are_used
    since.step_begins(lambda: 0)
    assert since.has_stepped and since.gradients_are_used
    since.backward_ended()
    assert since.has_stepped and not since.gradients_are_used


def test_used_gradients_are_cleared_late_where_that_was_seen_each_time() -> None:
    since = SinceLastCall()
    since.forward_begins(0, lambda: 0)
    since.backward_begins(lambda: 0)
    assert since.clears_late is None  # there were none to clear
    since.backward_ended()
    since.step_begins(lambda: 0)
    since.forward_begins(64, lambda: 0)
    since.backward_begins(lambda: 0)
    assert since.clears_late and since.cleared_bytes == 64
    since.backward_ended()
    since.forward_begins(64, lambda: 0)  # of another batch that adds to them
    assert since.cleared_bytes == 0
    since.backward_begins(lambda: 64)
    assert since.clears_late
    since.step_begins(lambda: 0)
    since.forward_begins(64, lambda: 0)
    since.backward_begins(lambda: 64)  # set to zero, and kept
    since.backward_begins(lambda: 0)
    assert since.clears_late is False and since.cleared_bytes == 0


def test_gradients_that_are_set_to_zero_in_place_are_not_expected_to_go() -> None:
    since = SinceLastCall()
    since.step_begins(lambda: 3)
    since.forward_begins(64, lambda: 3)
    assert since.used_bytes == 64 and since.sets_to_zero is False
    since = SinceLastCall()
    since.step_begins(lambda: 3)
    since.forward_begins(64, lambda: 5)
    assert since.used_bytes == 0 and since.sets_to_zero


def test_nothing_is_counted_on_where_a_call_has_several_backwards() -> None:
    since = SinceLastCall()
    since.step_begins(lambda: 0)
    since.forward_begins(64, lambda: 0)
    since.backward_begins(lambda: 0)
    assert since.cleared_bytes == 64
    since.backward_is_unusual()
    since.backward_begins(lambda: 0)
    assert since.cleared_bytes == 0


def test_outputs_count_for_as_long_as_the_caller_holds_them() -> None:
    tally, since = Account({"": nn.Linear(2, 2)}, None).tally, SinceLastCall()
    assert since.returned_bytes(tally) is None
    first, second = torch.zeros(64), torch.zeros(128)
    since.forward_ended([first, first[:8], "text", second])
    assert since.returned_bytes(tally) == first.nbytes + second.nbytes
    del first, second
    assert since.returned_bytes(tally) == 0
    since.forward_ended([torch.zeros(64)])
    assert since.returned_bytes(tally) == 0 and since.returned_bytes(None) is None
