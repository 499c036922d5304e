"""Which calls may be run again in their backward."""

from __future__ import annotations

from tightfit.session.step.repeated import RepeatedCalls


def test_calls_may_be_run_again_until_a_backward_has_shown_otherwise() -> None:
    calls = RepeatedCalls()
    assert calls.may_repeat("a") and not calls.is_repeated("a")
    calls.note_backward("a")
    assert not calls.may_repeat("a") and calls.may_repeat("b")


def test_calls_that_were_run_again_may_be_so_ever_after() -> None:
    calls = RepeatedCalls()
    calls.note_repeated("a")
    calls.note_backward("a")
    assert calls.is_repeated("a") and calls.may_repeat("a")
    assert not calls.is_repeated("b")
