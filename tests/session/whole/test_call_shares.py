"""Calls that await their backward at once divide a budget, and leave room for those to come."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from support.calls import Call
from support.handed import LayerCalls, chain
from tightfit.plan.assemble import everything_kept
from tightfit.planners.base import Limits
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.session.memory.account import Account
from tightfit.session.memory.budget import Budget
from tightfit.session.memory.surroundings import Share, Surroundings
from tightfit.session.options import Options, make_options
from tightfit.session.step.holding import Holding, holding_of
from tightfit.session.whole.advice import OpenCalls
from tightfit.session.whole.call_shares import CallShares

BUDGET = 1 << 20
VALUE, WEIGHTS = 4 * 64 * 64, 4 * (64 * 64 + 64)
CONSTANTS = VALUE + WEIGHTS + 64  # the input, the layer, the gradient of a loss outside


class Shares:
    """The shares of calls of one layer."""

    def __init__(self, budget_bytes: int = BUDGET, **keywords: int) -> None:
        self.layer = nn.Linear(64, 64)
        keywords = {"costs": "unit", "cache": False, **keywords}
        self.options: Options = make_options(budget_bytes, **keywords)
        self.account = Account({"model": self.layer}, torch.optim.SGD(self.layer.parameters()))
        self.shares = CallShares("layer", self.account)
        self.spec = LayerCalls(self.layer, self.options, chain).capture(rows=64)

        self.held_bytes = 0  # by earlier calls

    def alone(self) -> Surroundings:
        budget_bytes = self.options.planned_bytes
        return Surroundings("fresh", 0, 0, 0, self.held_bytes, budget_bytes, budget_bytes)

    def begin(self, *, presumes: bool = False, live_bytes: int | None = None) -> tuple[Call, Share]:
        """Begin a call; return it with its share."""
        self.shares.begin(self.spec, self.alone, self.options, presumes=presumes)
        share = self.shares.share(self.spec, self.alone(), self.options)
        call = Call()
        self.shares.called(self.spec, call, self.options, live_bytes)
        return call, share

    def planned(self, share: Share) -> Holding:
        """Return what a call holds by a plan within its share."""
        task = self.alone().with_share(share).task(self.spec.captured)
        plan = plan_with(DEFAULT, task, Limits(seconds=1.0)).plan
        assert plan is not None
        return holding_of(self.spec.captured.graph, plan)

    def open_calls(self) -> OpenCalls:
        return self.shares.open_calls(self.spec, self.alone(), self.options)

    def end(self, *calls: Call) -> None:
        for call in calls:
            call.is_open = False
            self.shares.window(self.options).backward_ended()


def test_a_call_alone_has_all_of_the_budget() -> None:
    shares = Shares()
    for _ in range(2):
        call, share = shares.begin()
        assert share == Share(BUDGET) and not shares.shares.has_others
        shares.end(call)
    shares.shares.begin(shares.spec, shares.alone, shares.options, presumes=False)
    assert shares.shares.is_alone(shares.spec, shares.options)


def test_calls_that_were_seen_to_follow_have_room_left() -> None:
    shares = Shares()
    first, share = shares.begin()
    assert share == Share(BUDGET)
    second, later = shares.begin()
    shares.end(second, first)
    assert later.peak_bytes < BUDGET  # less the gradients of the first backward
    first, expecting = shares.begin()
    assert expecting.reserved_bytes > 0
    assert expecting.peak_bytes + expecting.reserved_bytes < BUDGET
    assert shares.shares.has_others and not shares.shares.is_alone(shares.spec, shares.options)


def test_as_many_calls_are_expected_as_the_user_has_named() -> None:
    shares = Shares(in_flight=3)
    begun = [shares.begin() for _ in range(3)]
    first, second, third = (share.reserved_bytes for _, share in begun)
    assert first == 2 * second > third == 0
    del begun  # no backward can come
    assert shares.begin()[1].reserved_bytes == first


@pytest.mark.parametrize("values", [10, 13, 18])
def test_calls_that_run_within_their_shares_fit_together(values: int) -> None:
    """Each holds its saved tensors and outputs until its backward, whichever comes first.

    Each would keep five values, and its backward makes three.
    """
    shares, held = Shares(CONSTANTS + values * VALUE, in_flight=3), list[Holding]()
    calls = list[Call]()
    for _ in range(3):
        call, share = shares.begin()
        calls.append(call)
        held.append(shares.planned(share))
        shares.held_bytes += held[-1].staying_bytes
    working_bytes = max(holding.tangent_bytes + holding.rise_bytes for holding in held)
    another_bytes = WEIGHTS  # the gradients of a backward that has ended
    together_bytes = shares.held_bytes + working_bytes + another_bytes
    assert (values - 3) * VALUE < together_bytes <= values * VALUE


def test_what_came_with_calls_before_is_expected_with_the_next() -> None:
    """At first as much as the inputs of one call; then the most that has come since the last."""
    shares, reserved = Shares(), list[int]()
    for arrived_bytes in (None, 1000, 64, None):
        first, share = shares.begin()
        reserved.append(share.reserved_bytes)
        assert share.peak_bytes == BUDGET - share.reserved_bytes - WEIGHTS * (reserved[-1] > 0)
        shares.shares.window(shares.options).forward_ended(5000)
        live_bytes = None if arrived_bytes is None else 5000 + arrived_bytes
        second, _ = shares.begin(live_bytes=live_bytes)
        shares.end(second, first)
    assert reserved == [0, 5 * VALUE + VALUE, 5 * VALUE + 1000, 5 * VALUE + 1000]


@pytest.mark.parametrize("comes", [False, True])
def test_a_first_call_leaves_room_to_see_whether_another_comes(comes: bool) -> None:
    budget_bytes = CONSTANTS + 12 * VALUE  # two calls fit if they do not keep all
    shares = Shares(budget_bytes)
    call, share = shares.begin(presumes=True)
    assert shares.shares.presumes and share.reserved_bytes > 0
    others = [shares.begin()[0]] if comes else []
    assert shares.shares.presumes != comes
    shares.end(call, *others)
    call, share = shares.begin(presumes=True)
    assert not shares.shares.presumes and shares.shares.has_others == comes
    assert (share == Share(budget_bytes)) != comes


def test_no_room_is_left_for_calls_that_may_come_where_two_fit_without() -> None:
    """Or where there is none to leave, or the calls are named by the user."""
    for values in (6, 16):
        shares = Shares(CONSTANTS + values * VALUE)
        _, share = shares.begin(presumes=True)
        assert share == Share(shares.options.planned_bytes) and not shares.shares.presumes
    shares = Shares(CONSTANTS + 12 * VALUE, in_flight=1)
    assert shares.begin(presumes=True)[1] == Share(shares.options.planned_bytes)


def test_room_that_no_plan_can_leave_is_left_no_longer() -> None:
    shares = Shares(CONSTANTS + 12 * VALUE)
    _, share = shares.begin(presumes=True)
    assert share.reserved_bytes > 0
    shares.shares.stop_expecting_call()
    whole = shares.shares.share(shares.spec, shares.alone(), shares.options)
    assert whole == Share(shares.options.planned_bytes) and not shares.shares.presumes


def test_among_callables_of_one_budget_a_call_is_new_until_a_step_has_ended() -> None:
    shares = Shares()
    shared = Budget(BUDGET)
    shares.options = dataclasses.replace(shares.options, shared=shared, others_to_come=True)
    for is_new in (True, False):
        assert shares.shares.is_new(shares.spec, shares.options) == is_new
        call, _ = shares.begin()
        shares.end(call)
    shared.window.forget()
    assert shares.shares.is_new(shares.spec, shares.options)


def test_what_waiting_calls_keep_beyond_the_least_is_known_where_it_is_not_freed() -> None:
    shares = Shares(arena=True)
    graph = shares.spec.captured.graph
    shares.shares.note_plan(shares.spec, graph, everything_kept(graph))
    begun = [shares.begin() for _ in range(3)]
    kept = shares.open_calls()
    assert kept.waiting == 2 and len(begun) == 3
    values = [
        replace(v, size_bytes=v.size_bytes + 64 * (v.fate == "returned")) for v in graph.values
    ]
    more = replace(graph, values=tuple(values))
    shares.shares.note_plan(shares.spec, more, everything_kept(more))
    more_bytes = sum(v.size_bytes for v in values) - sum(v.size_bytes for v in graph.values)
    spare_bytes = shares.open_calls().spare_bytes
    assert spare_bytes == kept.spare_bytes + 2 * more_bytes > 0
    shares.options = dataclasses.replace(shares.options, arena=False)  # all of it can be freed
    assert shares.open_calls().spare_bytes > spare_bytes
    for call, _ in begun:
        call.is_freed = True
    assert shares.open_calls().spare_bytes == 0


def test_calls_do_not_keep_their_step_alive() -> None:
    shares = Shares()
    call, _ = shares.begin()
    shares.end(call)
    step = weakref.ref(shares.spec)
    del shares.spec
    assert step() is None
