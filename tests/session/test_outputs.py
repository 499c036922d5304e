"""Outputs without a gradient are planned without, once a few steps agree."""

from __future__ import annotations

from support.calls import reached
from tightfit.session.outputs import Usage


def test_an_output_is_left_out_after_three_steps_without_a_gradient() -> None:
    usage, left_out = Usage(), []
    for _ in range(3):
        usage.note("call", reached({0}))
        left_out.append(usage.settled("call"))
    assert left_out == [frozenset(), frozenset(), {1}]


def test_an_output_that_had_a_gradient_once_keeps_it() -> None:
    usage = Usage()
    usage.note("call", reached({1}))
    usage.settled("call")
    for _ in range(4):
        usage.note("call", reached({0}))
        assert usage.settled("call") == frozenset()


def test_two_backwards_of_a_step_count_together_and_calls_apart() -> None:
    usage = Usage()
    for _ in range(3):
        usage.note("both", reached({0}))
        usage.note("both", reached({1}))
        usage.note("other", reached({0}))
        assert usage.settled("both") == frozenset()
    assert usage.settled("other") == frozenset()  # its first step
