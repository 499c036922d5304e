"""What a step of parts held, and what it would hold under other plans."""

from __future__ import annotations

from tightfit.api.parts.ledger import Further, Holding, Ledger, Mark


def holding(saved: int, forward: int, rise: int) -> Holding:
    return Holding(None, saved, 6, 4, forward, rise, 1.0, 1.0)


def test_a_ledger_tells_the_peak_under_other_plans() -> None:
    """Two parts that save 100 each, 30 bytes of a loss between them and their backward."""
    old = holding(100, 150, 200)
    ledger = Ledger(
        calls=["a", "a"],
        holdings=[old, old],
        marks=[
            Mark("forward", 0, (), 0, 150),
            Mark("forward", 1, (0,), 110, 260),
            Mark("between", -1, (0, 1), 220, 250),
            Mark("backward", 1, (0,), 230, 435),  # 5 more than planned
            Mark("backward", 0, (), 130, 330),
            Mark("between", -1, (), 20, 9999),  # the optimizer's step depends on no plan
        ],
    )
    assert ledger.peak_bytes == 9999 and ledger.peak_with({}) == 435
    new = holding(40, 180, 250)
    assert ledger.peak_with({"a": new}) == 230 - 120 + 250 + 5
    room = ledger.room("a", {"a": 40}, 400)
    assert room == 400 - (230 - 100 - 60) - 5 + 10
    fitting = holding(40, room, room - 40 - 10)
    assert ledger.peak_with({"a": fitting}) == 400


def test_a_ledger_of_a_step_in_which_another_part_runs_too() -> None:
    """It runs last, so that its backward is the first and its gradients stay to the end."""
    old = holding(100, 150, 200)
    ledger = Ledger(
        calls=["a"],
        holdings=[old],
        marks=[
            Mark("forward", 0, (), 0, 150),
            Mark("between", -1, (0,), 110, 140),
            Mark("backward", 0, (), 120, 320),
            Mark("between", -1, (), 20, 30),
        ],
    )
    more = ledger.with_calls([Further("b", holding(40, 180, 300), 7)])
    assert more.calls == ["a", "b"]
    assert more.marks == [
        Mark("forward", 0, (), 0, 150),
        Mark("forward", 1, (0,), 110, 290),
        Mark("between", -1, (0, 1), 156, 186),
        Mark("backward", 1, (0,), 166, 466),
        Mark("backward", 0, (), 127, 327),
        Mark("between", -1, (), 27, 37),
    ]
    assert more.peak_with({}) == 466 and ledger.with_calls([]) is ledger
