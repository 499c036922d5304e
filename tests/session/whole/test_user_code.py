"""Memory of user code between forward and backward: assumed, then learned from two steps."""

from __future__ import annotations

from tightfit.session.whole.user_code import UserCode


def test_a_second_step_corrects_what_the_first_has_shown() -> None:
    code = UserCode(assumed_bytes=300)
    assert code.planned_bytes == 300 and not code.is_known
    assert code.saw(100, has_grown=False) == 100 and code.may_be_seen
    assert code.saw(40, has_grown=False) == 100  # the most of both
    assert code.is_known and not code.may_be_seen
    assert code.planned_bytes == 300  # plans that exist stay in use
    code.plan_for(100)
    assert code.planned_bytes == 100


def test_what_a_first_step_left_for_good_does_not_count() -> None:
    code = UserCode(assumed_bytes=0)
    code.saw(500, has_grown=True)  # it made the optimizer's state meanwhile
    assert code.saw(40, has_grown=False) == 40
    assert code.seen_bytes == 40
