"""What a call takes and hands back is what plain PyTorch's would, or is recorded as worse.

The record (`verdicts.json`) may only improve: `python tests/write_verdicts.py outputs` writes it.
Other doors: ``TIGHTFIT_DOOR=backend`` and ``aot_eager``.
"""

from __future__ import annotations

import pytest

from support.contract.doors import DOORS, asked_door
from support.contract.every_case import OUTPUTS
from support.contract.outputs import OutputCase, judged
from support.contract.verdicts import check_against_record, recorded

DOOR = asked_door()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", OUTPUTS, ids=lambda case: case.name)
def test_as_plain_pytorch_or_as_recorded(case: OutputCase) -> None:
    check_against_record(case.name, judged(case, DOORS[DOOR]), DOOR, "outputs")


def test_nothing_is_recorded_that_is_not_tried() -> None:
    names = [case.name for case in OUTPUTS]
    assert len({*names}) == len(names)
    assert {*recorded(DOOR, "outputs")} <= {*names}
