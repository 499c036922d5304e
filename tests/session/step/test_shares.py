"""How the calls of a step share a limit."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.step_programs import Program, menus, programs
from tightfit.session.step.holding import Holding
from tightfit.session.step.ledger import Interval, StepLedger
from tightfit.session.step.shares import by_call, by_kind

CALLS = 4
FRUGAL = Holding(None, 10, 0, 0, 100, 100, 2.0, 1.0)
LAVISH = Holding(None, 60, 0, 0, 100, 50, 1.0, 1.0)
Menus = dict[str, list[Holding]]


def frugal_step() -> StepLedger[str]:
    """Calls that are alike, one after the other; the last one's backward comes first."""
    open_calls = [tuple(range(call)) for call in range(CALLS)]
    forward = [Interval("forward", c, open_calls[c], 10 * c, 10 * c + 100) for c in range(CALLS)]
    backward = [
        Interval("backward", c, open_calls[c], 10 * (c + 1), 10 * c + 110) for c in range(CALLS)
    ]
    return StepLedger(("part",) * CALLS, (FRUGAL,) * CALLS, (*forward, *reversed(backward)))


@pytest.mark.parametrize(("limit_bytes", "lavish"), [(139, 0), (140, 1), (230, 2), (1000, 4)])
def test_as_many_calls_as_fit_run_the_cheaper_plan(limit_bytes: int, lavish: int) -> None:
    ledger = frugal_step()
    calls = by_call(ledger, limit_bytes, {"part": FRUGAL}, {"part": [FRUGAL, LAVISH]})
    assert calls == (FRUGAL,) * (CALLS - lavish) + (LAVISH,) * lavish
    assert lavish == 0 or ledger.peak_of(calls) <= limit_bytes
    more = [FRUGAL] * (CALLS - lavish - 1) + [LAVISH] * (lavish + 1)
    assert lavish == CALLS or ledger.peak_of(more) > limit_bytes


@st.composite
def limited(draw: st.DrawFn, kinds: int = 2) -> tuple[Program, Menus, StepLedger[str], int]:
    """Return a step, plans for its calls, its ledger with some of them, and a limit."""
    program, found = draw(programs(kinds=kinds)), draw(menus(kinds=kinds))
    ran = [draw(st.sampled_from(found[kind])) for kind in program.kinds]
    ledger = program.run(ran).with_base(draw(st.integers(0, 50)))
    most = ledger.peak_with({kind: menu[-1] for kind, menu in found.items()})
    return program, found, ledger, draw(st.integers(most // 3, most))


def divided(ledger: StepLedger[str], limit: int, found: Menus) -> tuple[Holding, ...] | None:
    kinds = by_kind(ledger, limit, found)
    return None if kinds is None else by_call(ledger, limit, kinds, found)


def cost(calls: tuple[Holding, ...]) -> float:
    return sum(holding.cost_s for holding in calls)


def every_combination(ledger: StepLedger[str], limit: int, found: Menus) -> list[float]:
    """Return what all combinations that fit cost, with one plan a kind."""
    kinds = sorted({*ledger.calls})
    combinations = (
        dict(zip(kinds, each, strict=True)) for each in product(*(found[k] for k in kinds))
    )
    return [
        cost(tuple(chosen[kind] for kind in ledger.calls))
        for chosen in combinations
        if ledger.peak_with(chosen) <= limit
    ]


@given(limited())
def test_of_one_plan_a_kind_the_cheapest_combination_is_found(case) -> None:
    program, found, ledger, limit = case
    fitting = every_combination(ledger, limit, found)
    chosen = by_kind(ledger, limit, found)
    assert (chosen is None) == (not fitting)
    calls = divided(ledger, limit, found)
    if calls is None:
        return
    assert cost(calls) <= min(fitting)
    assert program.peak(list(calls)) + ledger.base_bytes <= limit
    each = product(*(found[kind] for kind in ledger.calls))
    assert cost(calls) >= min(cost(c) for c in each if ledger.peak_of(c) <= limit)


def test_dearer_plans_for_each_kind_may_make_a_cheaper_step() -> None:
    """With one plan a kind 6 and 7; then the last call of the dearer has another: 5."""
    found = {
        "a": [Holding(None, 0, 7, 0, 7, 0, 3, 1), Holding(None, 57, 7, 0, 64, 0, 1, 1)],
        "b": [Holding(None, 0, 0, 0, 0, 0, 4, 1), Holding(None, 17, 0, 0, 17, 0, 1, 1)],
    }
    intervals = (
        Interval("forward", 0, (), 0, 7),
        Interval("forward", 1, (0,), 7, 14),
        Interval("forward", 2, (0, 1), 14, 14),
        Interval("between", -1, (0, 1, 2), 14, 27),
        Interval("backward", 2, (0, 1), 14, 14),
        Interval("backward", 1, (0,), 14, 14),
        Interval("backward", 0, (), 7, 7),
    )
    ledger = StepLedger(("a", "a", "b"), (found["a"][0], found["a"][0], found["b"][0]), intervals)
    calls = divided(ledger, 150, found)
    assert calls is not None and [holding.saved_bytes for holding in calls] == [0, 57, 17]


@given(limited(kinds=1).filter(lambda case: len(case[0].kinds) == 1))
def test_a_single_call_has_all_that_there_is(case) -> None:
    _, found, ledger, limit = case
    fitting = [h for h in found["a"] if ledger.peak_of([h]) <= limit]
    calls = divided(ledger, limit, found)
    assert (calls is None) == (not fitting)
    assert calls is None or cost(calls) == min(holding.cost_s for holding in fitting)


def nine_fractions_and_exchanges(ledger: StepLedger[str], limit: int, found: Menus) -> float | None:
    """Return the cost of what was chosen for parts before there was one rule."""

    def total(chosen: dict[str, Holding]) -> float:
        return sum(chosen[kind].cost_s for kind in ledger.calls)

    kinds = dict.fromkeys(ledger.calls)
    tried = [{kind: min(found[kind], key=lambda h: h.saved_bytes) for kind in kinds}]
    for eighths in range(9):
        ends = {k: (found[k][0].saved_bytes, found[k][-1].saved_bytes) for k in kinds}
        saved = {k: low + round(eighths / 8 * (high - low)) for k, (low, high) in ends.items()}
        chosen = {}
        for kind in kinds:
            room = ledger.rooms(saved, limit)[kind]
            plans = (h for h in found[kind] if h.saved_bytes <= saved[kind])
            fitting = [h for h in plans if h.peak_bytes <= room]
            if fitting:
                chosen[kind] = min(fitting, key=lambda h: h.cost_s)
        if len(chosen) == len(kinds):
            tried.append(chosen)
    fitting = [chosen for chosen in tried if ledger.peak_with(chosen) <= limit]
    best = min(fitting, key=total, default=None)
    while best is not None:
        others = ({**best, kind: h} for kind in kinds for h in found[kind])
        better = [o for o in others if ledger.peak_with(o) <= limit and total(o) < total(best)]
        if not better:
            return cost(by_call(ledger, limit, best, found))
        best = min(better, key=total)
    return None


@given(limited(kinds=3))
def test_no_step_costs_more_than_by_the_rule_before(case) -> None:
    _, found, ledger, limit = case
    before = nine_fractions_and_exchanges(ledger, limit, found)
    calls = divided(ledger, limit, found)
    if before is not None:
        assert calls is not None and cost(calls) <= before
    assert calls is None or ledger.peak_of(calls) <= limit
