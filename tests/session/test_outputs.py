"""Outputs without a gradient are planned without, once a few steps agree."""

from __future__ import annotations

from support.calls import reached
from tightfit.session.outputs import OutputGradients


def test_an_output_is_left_out_after_three_steps_without_a_gradient() -> None:
    gradients, left_out = OutputGradients(), []
    for _ in range(3):
        gradients.note("call", reached({0}))
        left_out.append(gradients.end_step("call"))
    assert left_out == [frozenset(), frozenset(), {1}]


def test_an_output_that_had_a_gradient_once_keeps_it() -> None:
    gradients = OutputGradients()
    gradients.note("call", reached({1}))
    gradients.end_step("call")
    for _ in range(4):
        gradients.note("call", reached({0}))
        assert gradients.end_step("call") == frozenset()


def test_two_backwards_of_a_step_count_together_and_calls_apart() -> None:
    gradients = OutputGradients()
    for _ in range(3):
        gradients.note("both", reached({0}))
        gradients.note("both", reached({1}))
        gradients.note("other", reached({0}))
        assert gradients.end_step("both") == frozenset()
    assert gradients.end_step("other") == frozenset()  # its first step
