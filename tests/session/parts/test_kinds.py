"""Calls of parts that are alike are captured once, whichever part they are of."""

from __future__ import annotations

import pytest
from torch import nn

from support.calls import reached
from support.handed import call_of, handed, linear
from tightfit.capture.handed import GraphArguments
from tightfit.session.options import make_options
from tightfit.session.parts import kinds
from tightfit.session.parts.kinds import KnownCalls, Part, class_of
from tightfit.session.stages import capture_step

OPTIONS = make_options("1GiB", costs="unit", cache=False)
GRAPH = handed(linear)


class Run:
    """A call whose backward has reached some of its two outputs."""

    def __init__(self, planned: set[int], came: set[int]) -> None:
        self.reached = reached(came, planned)


def known_calls() -> KnownCalls:
    return KnownCalls(lambda call, name: capture_step(call, OPTIONS, name))


def given(part: Part, rows: int = 4) -> GraphArguments:
    return call_of(part.function, GRAPH, part.modules["part"], rows)


def part_of(name: str) -> Part:
    return Part(name, {"part": nn.Linear(3, 2)})


def test_parts_of_one_shape_have_one_kind() -> None:
    known, one, other = known_calls(), part_of("one"), part_of("other")
    assert known.known(one, given(one)) is None
    call = known.capture(one, given(one), OPTIONS)
    assert known.known(other, given(other)).kind is call.kind
    assert known.known(one, given(one, rows=5)) is None
    further = known.capture(one, given(one, rows=5), OPTIONS)
    assert (call.kind.name, further.kind.name) == ("one", "one (another call, 1)")


def test_the_kinds_that_came_first_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_MOST_KEPT", 2)
    known, part = known_calls(), part_of("part")
    for rows in (4, 5, 6):
        known.capture(part, given(part, rows), OPTIONS)
    found = [known.known(part, given(part, rows)) is not None for rows in (4, 5, 6)]
    assert found == [False, True, True]


def test_an_output_without_a_gradient_is_left_out_until_it_has_one() -> None:
    known, part = known_calls(), part_of("part")
    call = known.capture(part, given(part), OPTIONS)
    for _ in range(3):
        assert known.known(part, given(part)) is not None
        known.learn_outputs(part, call.key, Run({0, 1}, {0}))
        known.settle_outputs()
    assert known.known(part, given(part)) is None
    assert known.capture(part, given(part), OPTIONS).kind.captured.joint.detached == {1}
    known.learn_outputs(part, call.key, Run({0}, {0, 1}))
    assert known.known(part, given(part)) is None
    assert not known.capture(part, given(part), OPTIONS).kind.captured.joint.detached


def test_containers_are_alike_where_what_they_contain_is() -> None:
    linear = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert class_of(linear) == class_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert class_of(linear) != class_of(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()))
    assert class_of(nn.Sequential(linear)) != class_of(nn.Sequential(nn.Sequential()))
    assert class_of(None) == class_of(None) != class_of(nn.ReLU())
