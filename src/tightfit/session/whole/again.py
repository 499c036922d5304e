"""A planned call that can be run again, plainly, where its backward is differentiated itself."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tightfit.capture.calls.structure import Arguments, structure_of, unflatten
from tightfit.capture.side_effects.attributes import WithKept
from tightfit.errors import WITHOUT_A_PLAN, TightfitError
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.specialisation import Specialisation

__all__ = ["CalledAgain"]


class CalledAgain:
    """One planned call, to be run again under autograd if its backward is differentiated.

    It runs what the call was captured from, on what the call was given, as long as all of that is
    what it was. Inputs that require a gradient are held for it: they count as inputs of the plan.
    Other inputs are held by the user's code, or gone.

    Parameters
    ----------
    captures : Captures
        What was captured of the callee.
    one : Specialisation
        The captured step.
    given : Arguments
        What the call was given.
    """

    def __init__(self, captures: Captures, one: Specialisation, given: Arguments) -> None:
        self._captures = captures
        self._one = one
        self._spec = given.spec
        self._leaves = tuple(
            weakref.ref(x) if isinstance(x, torch.Tensor) and not x.requires_grad else x
            for x in given.leaves
        )
        self._as_they_were: list[Any] = []

    def noted(self, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
        """Note how the placeholders are once the forward has run; return what it has given."""
        self._as_they_were = _state_of(inputs)
        return outputs

    def __call__(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run the forward again; return its tensors, flattened, and those of the placeholders."""
        captured = self._one.captured
        reason = _why_not(self._one)
        if reason is not None:
            raise _cannot(self._captures.callee.name, reason)
        leaves = [x() if isinstance(x, weakref.ref) else x for x in self._leaves]
        gone = [x for x in self._leaves if isinstance(x, weakref.ref) and x() is None]
        if gone:
            raise _cannot(
                self._captures.callee.name,
                "an input that needs no gradient is gone by then: keep it until backward",
            )
        args, kwargs = unflatten(leaves, self._spec)
        given = Arguments(args, kwargs, tuple(leaves), self._spec)
        captures = self._captures
        with torch.enable_grad():
            if captures.find(captures.signature(given), given) is not self._one:
                raise _cannot(captures.callee.name, "modules or modes were changed since the call")
            inputs = captures.inputs(self._one, given)
            if _state_of(inputs) != self._as_they_were:
                raise _cannot(
                    captures.callee.name,
                    "a parameter, buffer or input was changed since the call: change it after "
                    "backward",
                )
            output = captures.callee.function(*args, **kwargs)
        tensors, _ = structure_of(output, captures.callee.name)
        assert len(tensors) == len(captured.joint.outputs)
        return tensors, inputs


def _state_of(inputs: Sequence[Any]) -> list[Any]:
    """Return what shows whether tensors were changed in place or their memory replaced."""
    return [
        (x._version, x.data_ptr()) if isinstance(x, torch.Tensor) else x  # pyright: ignore
        for x in inputs
    ]


def _why_not(one: Specialisation) -> str | None:
    """Return why a step cannot be run twice with the same result and no further effect."""
    captured, joint = one.captured, one.captured.joint
    if any(op.random_state_bytes for op in captured.graph.ops):
        return "its forward draws random numbers"
    if joint.write_backs or joint.opaque.changes_state:
        return "its forward writes buffers or inputs"
    if isinstance(joint.structure.filled([None] * len(joint.outputs)), WithKept):
        return "its forward leaves tensors in attributes"
    kinds = {info.kind for info in joint.outputs}
    if joint.structure.numbers or "alias_of_output" in kinds:
        return "it returns numbers, or views of one another"
    return None


def _cannot(name: str, reason: str) -> TightfitError:
    return TightfitError(
        f"the backward of {name} is to be differentiated itself (create_graph=True): for that its "
        f"forward is run again, plainly, and here it cannot be, as {reason}. Take the derivative "
        "inside of what is planned (tightfit.step), leave the part that needs it out of the fitted "
        f"module, or tightfit.unfit(model) first. {WITHOUT_A_PLAN}"
    )
