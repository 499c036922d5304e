"""What a step of parts held, and what it would hold under other plans."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from support.step_programs import menus, programs
from tightfit.session.parts.choice import PartPlans
from tightfit.session.parts.history import StepHistory
from tightfit.session.step.edits import PossibleCall, as_called, with_calls, with_more, without_call
from tightfit.session.step.holding import Holding
from tightfit.session.step.ledger import Interval, StepLedger


def holding(saved: int, forward: int, rise: int) -> Holding:
    return Holding(None, saved, 6, 4, forward, rise, 1.0, 1.0)


def test_a_ledger_tells_the_peak_under_other_plans() -> None:
    """Two parts that save 100 each, 30 bytes of a loss between them and their backward."""
    old = holding(100, 150, 200)
    ledger = StepLedger(
        calls=("a", "a"),
        holdings=(old, old),
        intervals=(
            Interval("forward", 0, (), 0, 150),
            Interval("forward", 1, (0,), 110, 260),
            Interval("between", -1, (0, 1), 220, 250),
            Interval("backward", 1, (0,), 230, 435),  # 5 more than planned
            Interval("backward", 0, (), 130, 330),
            Interval("between", -1, (), 20, 9999),  # the optimizer's step depends on no plan
        ),
    )
    assert ledger.peak_with({}) == 435
    new = holding(40, 180, 250)
    assert ledger.peak_with({"a": new}) == 230 - 120 + 250 + 5
    room = ledger.rooms({"a": 40}, 400)["a"]
    assert room == 400 - (230 - 100 - 60) - 5 + 10
    fitting = holding(40, room, room - 40 - 10)
    assert ledger.peak_with({"a": fitting}) == 400


def three_layers() -> StepLedger:
    """Each keeps 100 and gives 6 to the next; 10 of gradients stay of each, 4 of tangents."""
    old = holding(100, 150, 200)
    intervals = [Interval("forward", c, tuple(range(c)), 106 * c, 106 * c + 150) for c in range(3)]
    intervals.append(Interval("between", -1, (0, 1, 2), 318, 330))
    for call in (2, 1, 0):
        begin = 106 * (call + 1) + 4 + 10 * (2 - call)
        intervals.append(Interval("backward", call, tuple(range(call)), begin, begin + 200))
        intervals.append(Interval("between", -1, tuple(range(call)), begin - 90, begin - 90))
    intervals[-1] = Interval("between", -1, (), 34, 44)
    return StepLedger(("layer",) * 3, (old,) * 3, tuple(intervals), ("first", "second", "third"))


ORDER = {"first": 0, "second": 1, "third": 2}


def test_a_call_left_out_and_put_back() -> None:
    """Its place in the order decides where: what is held at all intervals is then as before."""
    ledger = three_layers()
    old = ledger.holdings[0]
    for part, place in ORDER.items():
        less = without_call(ledger, place)
        assert less.parts == tuple(other for other in ORDER if other != part)
        assert [m.begin_bytes for m in less.intervals if m.phase == "forward"] == [0, 106]
        assert [m.peak_bytes for m in less.intervals if m.phase == "backward"] == [416, 320]
        assert less.intervals[-1].peak_bytes == 34
        more = with_calls(less, {part: PossibleCall("layer", old, 10)}, ORDER)
        planned = [mark for mark in more.intervals if mark.phase != "between"]
        assert planned == [mark for mark in ledger.intervals if mark.phase != "between"]
        assert (more.parts, more.calls) == (ledger.parts, ledger.calls)
        again = as_called(less, ledger, {part: PossibleCall("layer", old, 10)})
        assert again is not None and again.intervals == more.intervals
        assert as_called(ledger, less, {}).intervals == less.intervals
        assert as_called(less, ledger, {}) is None
    assert with_calls(ledger, {}, ORDER) is ledger


def test_the_peak_of_a_step_with_another_call_and_another_plan() -> None:
    less = without_call(three_layers(), 1)
    more = with_calls(less, {"second": PossibleCall("layer", holding(40, 180, 300), 10)}, ORDER)
    assert more.peak_with({}) == 106 + 46 + 4 + 10 + 300
    assert more.peak_with({"layer": holding(0, 10, 20)}) == 6 + 4 + 2 * 10 + 20


def test_the_peak_of_a_step_with_calls_that_hold_more() -> None:
    ledger = three_layers()
    more = with_more(ledger, [0, 50, 0])
    assert more.peak_with({}) == ledger.peak_with({}) + 50  # in the backward of the third
    assert more.intervals[-1] == ledger.intervals[-1]
    assert with_more(ledger, [0, 0, 0]) is ledger


class Layer(NamedTuple):
    name: str
    least: Holding
    most: Holding


SAVED = (100, 160, 120)


def test_a_call_of_another_size_in_each_step_is_foreseen_at_its_greatest() -> None:
    kinds = [Layer(f"{saved}", holding(40, 150, 200), holding(saved, 150, 200)) for saved in SAVED]
    history, step = StepHistory("inputs", 0), three_layers()
    steps = [replace(step, calls=(kinds[0], kind, kinds[0])) for kind in kinds]
    history.ended(steps[0])
    assert history.with_varying(steps[0]) is steps[0]
    for step in steps[1:]:
        history.ended(step)
    expected = with_more(steps[2], [0, 160 - 40, 0])
    assert history.with_varying(steps[2]).intervals == expected.intervals


def test_what_is_held_when_a_call_begins_is_compared_with_what_was_foreseen() -> None:
    ledger, less = three_layers(), holding(40, 150, 200)
    plans = [less] * 3
    assert [ledger.begin_of(call, plans) for call in range(3)] == [0, 46, 92]
    history = StepHistory("inputs", 1000)
    history.plan(PartPlans({"layer": less}, tuple(plans), {}), ledger.with_base(1000))
    assert history.planned_holding("third", "layer") is less
    spare = 7
    limit = history.planned_bytes + spare
    assert history.holds_as_planned(1000 + 92 + spare, limit)
    assert not history.holds_as_planned(1000 + 92 + spare + 1, limit)


@given(programs(), menus(), st.data())
def test_the_peak_under_other_plans_is_what_a_run_with_them_holds(program, found, data) -> None:
    def some_plans() -> list[Holding]:
        return [data.draw(st.sampled_from(found[kind])) for kind in program.kinds]

    ledger, others = program.run(some_plans()), some_plans()
    assert ledger.with_base(7).peak_of(others) == 7 + program.peak(others)
    assert program.run(others).peak_of(ledger.holdings) == program.peak(list(ledger.holdings))
