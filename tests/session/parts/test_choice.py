"""The plans of a model's parts are chosen alike here and in a process apart."""

from __future__ import annotations

from typing import Any

import pytest

from support.chains import Layer, graph_of_layers
from tightfit.plan.assemble import everything_kept
from tightfit.planners import apart
from tightfit.planners.base import Limits
from tightfit.planners.child import run_in_child
from tightfit.session.options import make_options
from tightfit.session.parts.choice import choose
from tightfit.session.parts.kind_plans import KindPlans, least_plan
from tightfit.session.step.holding import holding_of
from tightfit.session.step.ledger import StepLedger
from tightfit.session.step.presumed import presumed_step

LIMITS = Limits(seconds=2.0, gap=1e-4)


def kind(name: str, layers: int) -> KindPlans:
    graph = graph_of_layers([Layer(1.0, 2.0, 1 << 12, 1 << 10) for _ in range(layers)])
    plans = least_plan(graph, 2, LIMITS), everything_kept(graph)
    return KindPlans(graph, name, *(holding_of(graph, plan) for plan in plans), alike=2)


def step() -> StepLedger[KindPlans]:
    kinds = [kind("short", 4), kind("long", 7)]
    calls = (kinds[0], kinds[1], kinds[0])
    return presumed_step(calls, [each.most for each in calls], 0)


def test_a_process_apart_finds_the_plans_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def counted(target: str, *rest: Any, **named: Any) -> bool:
        started.append(target)
        return run_in_child(target, *rest, **named)

    monkeypatch.setattr(apart, "run_in_child", counted)
    options = make_options("1GiB", costs="unit", cache=False, limits=(2.0, 1e-4))
    found = []
    for elsewhere in (False, True):
        ledger = step()
        least = ledger.peak_with({each: each.least for each in ledger.calls})
        most = ledger.peak_with({each: each.most for each in ledger.calls})
        limit = (least + most) // 2
        chosen = choose(ledger, limit, options, apart=elsewhere)
        assert chosen is not None and ledger.peak_of(chosen.calls) <= limit < most
        found.append(chosen.overhead)
        assert all(holding in each.menu for each, holding in chosen.kinds.items())
    assert found[0] == pytest.approx(found[1])
    assert 1 <= len(started) <= 3


def test_no_plan_is_noted_twice() -> None:
    own = kind("one", 3)
    for _ in range(2):
        own.note(own.most)
    assert own.menu == [own.least, own.most]
