"""What is foreseen for a step of parts, and what follows where more is held than that."""

from __future__ import annotations

import dataclasses

from session.parts.test_choice import step
from tightfit.session.options import make_options
from tightfit.session.parts.choice import choose
from tightfit.session.parts.history import StepHistory


def test_later_calls_make_up_for_what_is_held_and_was_not_foreseen() -> None:
    parts = ("first", "second", "third")
    ledger = dataclasses.replace(step(), parts=parts)
    everything = choose(ledger, 1 << 30, make_options("1GiB", costs="unit", cache=False))
    assert everything is not None
    history = StepHistory(None, 0)
    history.plan(everything, ledger)
    history.begin()
    least_bytes = ledger.peak_with({kind: kind.least for kind in ledger.calls})
    expected = []
    for turn, (part, kind) in enumerate(zip(parts, ledger.calls, strict=True)):
        assert history.planned_holding(part, kind) is everything.calls[turn]
        begin_bytes = ledger.begin_of(turn, everything.calls)
        assert history.holds_as_planned(begin_bytes, history.planned_bytes)
        assert not history.holds_as_planned(begin_bytes + 1, history.planned_bytes)
        expected.append(history.peak_from_here(begin_bytes + 100) - 100)
    assert least_bytes < expected[0] < expected[1] <= expected[2] == history.planned_bytes
