"""What ran outside of every plan: noted by place, announced once, counted where graphs change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tightfit.dynamo.outside import Outside


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.fixture
def outside(net: nn.Sequential) -> Outside:
    return Outside("net", {"": net})


def test_each_break_is_announced_once_and_a_few_are_named(outside, capsys):
    for reason in ("print (a.py:1)\nand its stack", "item (a.py:2)") * 2:
        outside.broke(reason)
    place = "the code where Dynamo ends a graph"
    assert outside.reasons() == {place: "print (a.py:1)", f"{place} (2)": "item (a.py:2)"}
    assert capsys.readouterr().err.count(place) == 2
    for number in range(9):
        outside.broke(f"another (a.py:{number})")
    assert len(outside.reasons()) == 4
    assert "item (a.py:2)" in str(outside.nothing_planned())


def test_only_what_is_left_to_python_changes_which_graphs_there_are(outside, net):
    outside.broke("a call of print")
    outside.note_new_calls()
    assert outside.left == 0 and not outside.has_outside_code
    outside.skipped(nn.Linear.forward.__code__, net[0], "it is traced", None)
    outside.skipped(nn.Linear.forward.__code__, net[0], "it is traced again", None)
    outside.skipped(nn.Linear.reset_parameters.__code__, net[1], "no forward", None)
    outside.skipped(nn.Linear.forward.__code__, nn.Linear(1, 1), "no part of it", None)
    assert outside.left == 1 and outside.has_outside_code
    assert outside.reasons()["module '0'"] == "it is traced"


def test_a_module_that_no_plan_holds_is_returned_to_run_plainly(outside, net):
    assert outside.left_out("1", ValueError("too large")) is net[1]
    assert outside.left_out("2", ValueError("too large")) is None
    assert outside.reasons() == {"module '1'": "too large"}


def test_a_frame_that_had_no_room_to_be_looked_at_says_nothing(outside, net):
    refusal = RuntimeError("tightfit: the budget of 1 bytes has no room for a further 64 bytes")
    wrapped = ValueError("cannot be traced")
    wrapped.__cause__ = refusal
    with pytest.raises(RuntimeError, match="no room"):
        outside.skipped(nn.Linear.forward.__code__, net[0], "it failed", wrapped)
    assert outside.left == 0


def test_parameters_whose_first_gradient_is_of_no_plan_are_named(outside, net, capsys):
    outside.watch(lambda parameter: parameter is net[0].weight or parameter is net[0].bias)
    net(torch.ones(1, 4)).sum().backward()
    assert list(outside.reasons()) == ["module '1'"]
    outside.watch(lambda parameter: True)
    net(torch.ones(1, 4)).sum().backward()
    assert list(outside.reasons()) == ["module '1'"]
