"""What is foreseen for a step of parts, and what follows where more is held than that."""

from __future__ import annotations

import dataclasses

from session.parts.test_choice import step
from tightfit.session.options import make_options
from tightfit.session.parts.choice import choose
from tightfit.session.parts.history import Situation


def test_later_calls_make_up_for_what_is_held_and_was_not_foreseen() -> None:
    parts = ("first", "second", "third")
    ledger = dataclasses.replace(step(), parts=parts)
    everything = choose(ledger, 1 << 30, make_options("1GiB", costs="unit", cache=False))
    assert everything is not None
    situation = Situation(None, 0)
    situation.plan(everything, ledger)
    situation.begin()
    least_bytes = ledger.peak_with({kind: kind.least for kind in ledger.calls})
    expected = []
    for turn, (part, kind) in enumerate(zip(parts, ledger.calls, strict=True)):
        assert situation.foreseen(part, kind) is everything.calls[turn]
        begin_bytes = ledger.begin_of(turn, everything.calls)
        assert situation.is_as_foreseen(begin_bytes, situation.planned_bytes)
        assert not situation.is_as_foreseen(begin_bytes + 1, situation.planned_bytes)
        expected.append(situation.peak_from_here(begin_bytes + 100) - 100)
    assert least_bytes < expected[0] < expected[1] <= expected[2] == situation.planned_bytes
