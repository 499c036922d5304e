"""What a user changes between two steps has the effect that it has in plain PyTorch.

Equal, or a new plan, or an error by name; the record (`verdicts.json`) may only improve:
`python tests/write_verdicts.py guards` writes it.
"""

from __future__ import annotations

import pytest

from support.contract.changes import ChangeCase, has_effect, judged_changes
from support.contract.doors import DOORS, asked_door
from support.contract.every_case import CHANGES
from support.contract.verdicts import check_against_record, recorded

DOOR = asked_door()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.name)
def test_as_plain_pytorch_or_as_recorded(case: ChangeCase) -> None:
    check_against_record(case.name, judged_changes(case, DOORS[DOOR]), DOOR, "guards")


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.name)
def test_plain_pytorch_shows_the_change(case: ChangeCase) -> None:
    assert has_effect(case) == case.is_seen


def test_nothing_is_recorded_that_is_not_tried() -> None:
    names = [case.name for case in CHANGES]
    assert len({*names}) == len(names)
    assert {*recorded(DOOR, "guards")} <= {*names}
