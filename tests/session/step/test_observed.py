"""The ledger of a running step: its calls, and the intervals between them."""

from __future__ import annotations

from support.step_programs import Memory
from tightfit.session.step.holding import Holding
from tightfit.session.step.observed import LedgerWriter

HOLDING = Holding(None, 10, 1, 1, 20, 5, 1.0, 1.0)


def test_every_turn_ends_a_stretch_with_its_peak() -> None:
    memory = Memory()
    writer = LedgerWriter(memory)
    first = writer.forward_begins("a", HOLDING)
    memory.touch(20)
    memory.change(10)
    writer.forward_ended(first)
    assert writer.awaits(first) and not writer.has_begun_backward and not writer.is_complete
    memory.touch(3)
    writer.backward_begins(first)
    assert writer.has_begun_backward and not writer.awaits(first) and not writer.is_complete
    memory.change(-10)
    writer.backward_ended()
    assert writer.is_complete
    ledger = writer.ledger(base_bytes=100)
    found = [(i.phase, i.call, i.open, i.begin_bytes, i.peak_bytes) for i in ledger.intervals]
    assert found == [
        ("between", -1, (), 0, 0),
        ("forward", 0, (), 0, 20),
        ("between", -1, (0,), 10, 13),
        ("backward", 0, (), 10, 10),
        ("between", -1, (), 0, 0),
    ]
    assert (ledger.calls, ledger.base_bytes) == (("a",), 100)


def test_a_call_whose_outputs_are_gone_is_awaited_no_more() -> None:
    writer = LedgerWriter(Memory())
    kept = writer.forward_begins("a", HOLDING)
    writer.forward_ended(kept)
    dropped = writer.forward_begins("b", HOLDING, part="part")
    writer.forward_ended(dropped)
    writer.dropped(dropped)
    assert writer.awaits(kept) and not writer.awaits(dropped)
    writer.backward_begins(kept)
    writer.backward_ended()
    assert writer.is_complete and writer.ledger(0).parts == (None, "part")
