"""Memory of user code around a planned forward: assumed, then learned, and named in refusals."""

from __future__ import annotations

import re
import weakref

import pytest
import torch
from torch import nn

from support.handed import LayerCalls
from tightfit.allocator.refusal_details import BEFORE_BACKWARD, UNKNOWN
from tightfit.plan.assemble import everything_kept
from tightfit.session.memory.account import Account
from tightfit.session.options import make_options
from tightfit.session.whole.user_code import OpenCall, PlannedForward, UserCode

LIMIT = 1 << 20
WEIGHTS = 4 * (64 * 64 + 64)  # bytes of the layer's parameters


def test_a_second_step_corrects_what_the_first_has_shown() -> None:
    code = UserCode(assumed_bytes=300)
    assert code.planned_bytes == 300 and not code.is_known
    assert code.note_measured(100, has_grown=False) == 100 and code.is_learning
    assert code.note_measured(40, has_grown=False) == 100  # the most of both
    assert code.is_known and not code.is_learning
    assert code.planned_bytes == 300  # plans that exist stay in use
    code.plan_for(100)
    assert code.planned_bytes == 100


def test_what_a_first_step_left_for_good_does_not_count() -> None:
    code = UserCode(assumed_bytes=0)
    code.note_measured(500, has_grown=True)  # it made the optimizer's state meanwhile
    assert code.note_measured(40, has_grown=False) == 40
    assert code.measured_bytes == 40


class Limited:
    """A layer that keeps to a limit, and a call of it whose backward is to come."""

    def __init__(self, momentum: float = 0.0) -> None:
        self.layer = nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=momentum)
        self.account = Account({"model": self.layer}, self.optimizer)
        self.spec = LayerCalls(self.layer, make_options(LIMIT, costs="unit", cache=False)).capture(
            rows=64
        )
        self.account.set_limit(LIMIT)
        self.open_call = self.further_call()

    def further_call(self) -> OpenCall:
        """Return the place of the calls of a callable within the same limit."""
        needs = weakref.WeakMethod(self.needed_bytes)
        return OpenCall(self.account, BEFORE_BACKWARD, UNKNOWN, needs)

    def needed_bytes(self) -> int:
        """Return that nothing is known of later steps."""
        return 0

    def forward_ended(self) -> None:
        captured = self.spec.captured
        plan = everything_kept(captured.graph)
        forward = PlannedForward(captured, self.spec.user_code, captured.graph, plan)
        self.account.enforce()
        self.open_call.forward_ended(forward)

    def refused(self, beyond_bytes: int = 64) -> str:
        """Return the error of a request for so many bytes more than are free."""
        size_bytes = LIMIT - self.account.held_bytes() + beyond_bytes
        with pytest.raises(RuntimeError, match="has no room") as refused:
            torch.empty(size_bytes, dtype=torch.uint8)
        return str(refused.value)

    def advised_bytes(self) -> int:
        found = re.search(r"Try a budget of (\d+) bytes", self.refused())
        assert found is not None
        return int(found[1])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_in_the_first_two_steps_a_request_has_room_when_it_comes_again(momentum: float) -> None:
    """With the optimizer's state to come, and a fifth of what passes for code not seen yet."""
    limited, asked_bytes = Limited(momentum), LIMIT + 64
    limited.forward_ended()
    state_bytes = WEIGHTS if momentum else 0
    passing_bytes = asked_bytes - WEIGHTS
    assert limited.advised_bytes() == asked_bytes + state_bytes + passing_bytes // 5
    limited.spec.user_code.note_measured(0, has_grown=True)
    for parameter in limited.layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    passing_bytes -= WEIGHTS
    assert limited.advised_bytes() == asked_bytes + state_bytes + passing_bytes // 5
    limited.optimizer.step()
    passing_bytes -= state_bytes
    assert limited.advised_bytes() == asked_bytes + passing_bytes // 5


def test_a_step_that_was_seen_to_its_end_tells_what_later_steps_take() -> None:
    """Unless they take more already: then it tells nothing of the code to come."""
    limited, asked_bytes, passing_bytes = Limited(0.9), LIMIT + 64, LIMIT // 2
    limited.forward_ended()
    torch.empty(passing_bytes, dtype=torch.uint8)
    held_bytes = limited.account.held_bytes()
    coming_bytes = limited.account.coming_state_within_limit_bytes
    limited.account.loop_peaks.call_begins([])
    limited.account.loop_peaks.step_begins(held_bytes, lambda: True, coming_bytes)
    unseen_bytes = (asked_bytes - WEIGHTS) // 5
    assert limited.advised_bytes() == asked_bytes + WEIGHTS + unseen_bytes
    limited.account.loop_peaks.call_begins([])
    limited.account.set_limit(4 * LIMIT)
    torch.empty(3 * passing_bytes, dtype=torch.uint8)
    limited.account.set_limit(LIMIT)
    limited.account.loop_peaks.step_begins(held_bytes, lambda: True, coming_bytes)
    assert limited.advised_bytes() == held_bytes + 3 * passing_bytes + WEIGHTS


def test_from_the_third_step_on_code_is_left_what_it_was_seen_to_hold() -> None:
    limited = Limited()
    limited.forward_ended()
    held_bytes, measured_bytes = limited.account.held_bytes(), LIMIT + (1 << 14)
    for _ in range(2):
        limited.spec.user_code.note_measured(measured_bytes, has_grown=False)
    needed_bytes = held_bytes + measured_bytes
    assert limited.advised_bytes() == needed_bytes + needed_bytes // 200  # and numbers that stay


def test_an_open_call_has_the_last_word() -> None:
    """What another callable of the budget has said between calls does not take its place."""
    limited = Limited()
    other = limited.further_call()
    limited.account.rest()
    assert "no room" in limited.refused()  # the other has described it, too
    limited.forward_ended()
    assert BEFORE_BACKWARD.sentence in limited.refused()
    limited.open_call.end()
    assert BEFORE_BACKWARD.sentence not in limited.refused() and other.is_closed
