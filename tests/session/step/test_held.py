"""What a call was given is held for as long as its plan needs it, and for further backwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tightfit.capture.calls.structure import flat_spec
from tightfit.capture.handed import GraphArguments
from tightfit.session.step import held as module
from tightfit.session.step.held import HeldInputs, release_retained


def given() -> GraphArguments:
    weight, x, hidden = torch.nn.Parameter(torch.ones(3)), torch.ones(3), torch.ones(3)
    args = x, hidden * weight, 0
    return GraphArguments(args, {}, args, flat_spec(3), (weight, *args))


def test_only_what_a_plan_keeps_is_held() -> None:
    arguments = given()
    weight, x, hidden = (weakref.ref(tensor) for tensor in arguments.inputs[:3])
    held = HeldInputs(arguments)
    held.hold_only({0}, frozenset(), "none")
    assert held.now() is not None
    del arguments
    gc.collect()
    assert x() is not None
    assert weight() is None and hidden() is None
    assert held.now() is None


def test_inputs_are_held_in_case_a_call_is_repeated_until_they_are_released() -> None:
    arguments = given()
    x, hidden = (weakref.ref(tensor) for tensor in arguments.args[:2])
    held = HeldInputs(arguments)
    held.hold_only(frozenset(), frozenset(), "in case")
    del arguments
    gc.collect()
    assert x() is not None and hidden() is not None and held.now() is not None
    held.release()
    assert x() is None and hidden() is None and held.now() is None


def test_inputs_that_a_backward_will_need_are_not_released() -> None:
    held = HeldInputs(given())
    held.hold_only(frozenset(), frozenset(), "in case")
    held.hold_all()
    held.release()
    assert held.now() is not None


def test_what_a_call_writes_into_is_never_held() -> None:
    arguments = given()
    hidden = weakref.ref(arguments.args[1])
    held = HeldInputs(arguments)
    held.hold_only({1}, {1}, "always")
    held.hold_all()
    del arguments
    gc.collect()
    assert hidden() is None


def test_inputs_that_no_call_makes_again_stay_for_a_further_backward() -> None:
    arguments = given()
    weight = arguments.inputs[0]
    held = HeldInputs(arguments)
    held.hold_only(frozenset(), frozenset(), "none")
    held.hold_all()
    release_retained()
    expected = [t.clone() for t in arguments.args[:2]]
    del arguments
    gc.collect()
    now = held.now()
    assert now is not None and weight is not None
    assert all(map(torch.equal, expected, now.args[:2]))


class Maker:
    """A call that makes an output again of its inputs."""

    def __init__(self) -> None:
        arguments = given()
        self.inputs = HeldInputs(arguments)
        self.inputs.hold_only(frozenset(), frozenset(), "in case")

    def promises_outputs(self) -> bool:
        return self.inputs.promise()


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_input_is_released_only_if_it_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    maker, made = Maker(), torch.nn.Parameter(torch.ones(3)) * 2
    run: Any = maker
    monkeypatch.setattr(module, "made_by", lambda _: (run, 0))
    held = HeldInputs(GraphArguments((made,), {}, (made,), flat_spec(1), (made,)))
    held.hold_all()
    del made
    if is_gone:  # what the other call would make it of
        maker.inputs.release()
    held.release()
    assert (held.now() is not None) == is_gone
    maker.inputs.release()
    assert (maker.inputs.now() is not None) != is_gone  # a promise is kept
