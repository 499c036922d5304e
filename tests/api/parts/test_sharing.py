"""How the calls of a step share what the budget leaves."""

from __future__ import annotations

import pytest

from tightfit.session.parts.choice import PartPlans
from tightfit.session.parts.ledger import Holding, Ledger, Mark

CALLS = 4
FRUGAL = Holding(None, 10, 0, 0, 100, 100, 2.0, 1.0)
LAVISH = Holding(None, 60, 0, 0, 100, 50, 1.0, 1.0)


def frugal_step() -> Ledger[str]:
    """Parts that are alike, one after the other; the last one's backward comes first."""
    open_calls = [tuple(range(call)) for call in range(CALLS)]
    forward = [Mark("forward", c, open_calls[c], 10 * c, 10 * c + 100) for c in range(CALLS)]
    backward = [
        Mark("backward", c, open_calls[c], 10 * (c + 1), 10 * c + 110) for c in range(CALLS)
    ]
    return Ledger(["part"] * CALLS, [FRUGAL] * CALLS, [*forward, *reversed(backward)])


@pytest.mark.parametrize(("limit_bytes", "lavish"), [(139, 0), (140, 1), (230, 2), (1000, 4)])
def test_as_many_calls_as_fit_run_the_cheaper_plan(limit_bytes: int, lavish: int) -> None:
    ledger = frugal_step()
    choice = PartPlans({"part": FRUGAL}, (), {"part": [FRUGAL, LAVISH]})
    calls = choice.spread(ledger, limit_bytes).calls
    assert calls == (FRUGAL,) * (CALLS - lavish) + (LAVISH,) * lavish
    assert lavish == 0 or ledger.peak_of(calls) <= limit_bytes
    more = [FRUGAL] * (CALLS - lavish - 1) + [LAVISH] * (lavish + 1)
    assert lavish == CALLS or ledger.peak_of(more) > limit_bytes
