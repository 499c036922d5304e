"""What calls that were not seen yet may keep, and which are expected."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.calls import Call
from tightfit.session.step.presumed import KeptRange, common_fraction, presumed_step
from tightfit.session.step.window import Window


@st.composite
def ranges(draw: st.DrawFn) -> KeptRange:
    least, more, working = (draw(st.integers(0, 1000)) for _ in range(3))
    return KeptRange(least, least + more, working)


@given(st.lists(ranges(), min_size=1, max_size=4), st.integers(0, 100), st.integers(0, 10_000))
@example([KeptRange(0, 93, 0)], 0, 63)
@example([KeptRange(0, 1, 0), KeptRange(0, 10, 0)], 0, 1)
def test_calls_keep_as_much_as_there_is_room_for(calls, base, limit) -> None:
    named = dict(enumerate(calls))
    fraction = common_fraction(named, base, limit)
    least, most = ([each.at(part) for each in calls] for part in (0.0, 1.0))
    shared, more = ([each.at(min(1.0, fraction + d)) for each in calls] for d in (0.0, 0.01))
    if presumed_step([*named], most, base).peak_of(most) <= limit:
        assert fraction == 1.0
    elif presumed_step([*named], least, base).peak_of(least) > limit:
        assert fraction == 0.0
    else:
        assert presumed_step([*named], shared, base).peak_of(shared) <= limit
        kept, kept_more = ([each.saved_bytes for each in held] for held in (shared, more))
        rounding = len(calls)  # each keeps whole bytes
        peak = presumed_step([*named], more, base).peak_of(more)
        assert peak > limit - rounding or kept_more == kept


@given(st.lists(ranges(), min_size=1, max_size=4), st.integers(0, 10_000))
def test_no_call_keeps_less_than_by_the_rule_before(calls: list[KeptRange], room: int) -> None:
    """It divided what the largest working set left in proportion to what may be kept more."""
    working = max(each.working_bytes for each in calls)
    spare = room - working - sum(each.least_bytes for each in calls)
    spans = sum(each.span_bytes for each in calls)
    before = min(1.0, max(0, spare) / spans) if spans else 0.0
    assert common_fraction(dict(enumerate(calls)), 0, room) >= before - 1e-9


@given(ranges(), st.integers(1, 5), st.integers(0, 10_000))
def test_calls_of_a_kind_may_be_taken_together(own: KeptRange, count: int, room: int) -> None:
    apart = common_fraction(dict.fromkeys(range(count), own), 0, room)
    assert common_fraction({"all": own.times(count)}, 0, room) == pytest.approx(apart, abs=1e-9)


def run(window: Window[str], step: str) -> list[str]:
    """Run a step, a letter for each forward and ``.`` for the last backward; return what came."""
    calls, expected = list[Call](), list[str]()
    for letter in step:
        if letter == ".":
            calls.pop().is_open = False
            window.backward_ended()
        else:
            expected.append("".join(window.to_come(letter)))
            calls.append(Call())
            window.begins(letter, calls[-1])
    for call in calls:
        call.is_open = False
    return expected


def test_calls_are_expected_that_were_seen_to_follow() -> None:
    window: Window[str] = Window()
    assert run(window, "AAA...") == ["", "", ""]
    assert run(window, "AAA...") == ["AA", "A", ""]
    assert run(window, "AB.C..") == ["AA", "", ""]
    assert run(window, "AB.C..") == ["AA", "", ""]
    assert window.knows("A") and not window.knows("B")
    for _ in range(16):
        run(window, "AB..")
    assert run(window, "AA..") == ["B", ""]


def test_calls_that_differ_by_their_inputs_are_expected_to_be_followed_alike() -> None:
    window: Window[str] = Window()
    run(window, "Ab..")
    assert not window.knows("a") and not window.to_come("a")
    assert window.to_come("a", lambda one, other: one.lower() == other.lower()) == ("b",)


def test_a_step_whose_calls_were_dropped_teaches_nothing() -> None:
    window: Window[str] = Window()
    run(window, "AA")
    assert not window.has_history and not window.knows("A") and not window.was_alone
    run(window, "A.")
    assert window.knows("A") and window.was_alone
    window.forget()
    assert not window.knows("A")
