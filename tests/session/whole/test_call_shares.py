"""Calls that await their backward at once divide a budget, and leave room for those to come."""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import nn

from support.handed import LayerCalls
from tightfit.plan.assemble import everything_kept
from tightfit.session.memory.account import Account
from tightfit.session.memory.surroundings import Share, Surroundings
from tightfit.session.options import Options, make_options
from tightfit.session.whole.advice import OpenCalls
from tightfit.session.whole.call_shares import CallShares

BUDGET = 1 << 20


@dataclass(eq=False)
class Call:
    """A call that awaits its backward."""

    is_open: bool = True
    is_freed: bool = False


class Shares:
    """The shares of calls of one layer."""

    def __init__(self, **keywords: int) -> None:
        self.layer = nn.Linear(64, 64)
        self.options: Options = make_options(BUDGET, costs="unit", cache=False, **keywords)
        self.account = Account({"model": self.layer}, torch.optim.SGD(self.layer.parameters()))
        self.shares = CallShares("layer", self.account)
        self.spec = LayerCalls(self.layer, self.options).capture(rows=64)

    def alone(self) -> Surroundings:
        return Surroundings("fresh", 0, 0, 0, 0, BUDGET, BUDGET)

    def begin(self) -> tuple[Call, Share]:
        """Begin a call; return it with its share."""
        self.shares.begin(self.spec, self.alone, self.options, looks=False)
        share = self.shares.share(self.spec, self.alone(), self.options)
        call = Call()
        self.shares.called(self.spec, call, self.options, None)
        return call, share

    def open_calls(self) -> OpenCalls:
        return self.shares.open_calls(self.spec, self.alone(), self.options)

    def end(self, *calls: Call) -> None:
        for call in calls:
            call.is_open = False
            self.shares.window(self.options).ended()


def test_a_call_alone_has_all_of_the_budget() -> None:
    shares = Shares()
    for _ in range(2):
        call, share = shares.begin()
        assert share == Share(BUDGET) and not shares.shares.has_company
        shares.end(call)
    shares.shares.begin(shares.spec, shares.alone, shares.options, looks=False)
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
    assert shares.shares.has_company and not shares.shares.is_alone(shares.spec, shares.options)


def test_as_many_calls_are_expected_as_the_user_has_named() -> None:
    shares = Shares(in_flight=3)
    begun = [shares.begin() for _ in range(3)]
    first, second, third = (share.reserved_bytes for _, share in begun)
    assert first == 2 * second > third == 0
    del begun  # no backward can come
    assert shares.begin()[1].reserved_bytes == first


def test_what_waiting_calls_keep_beyond_the_least_is_known_where_it_is_not_freed() -> None:
    shares = Shares(arena=True)
    graph = shares.spec.captured.graph
    shares.shares.runs_by(shares.spec, graph, everything_kept(graph))
    begun = [shares.begin() for _ in range(3)]
    kept = shares.open_calls()
    assert kept.waiting == 2 and len(begun) == 3
    values = [
        replace(v, size_bytes=v.size_bytes + 64 * (v.fate == "returned")) for v in graph.values
    ]
    more = replace(graph, values=tuple(values))
    shares.shares.runs_by(shares.spec, more, everything_kept(more))
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
