"""A planned call that can be run again in its backward, where its plan does not do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from tightfit.capture.calls.structure import Arguments, structure_of
from tightfit.capture.side_effects.attributes import WithKept
from tightfit.capture.side_effects.generators import GeneratorStates
from tightfit.errors import WITHOUT_A_PLAN, TightfitError
from tightfit.execution.otherwise import Planned, gradients_at_once, unplanned
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.specialisation import Specialisation

__all__ = ["CalledAgain", "Replan"]

Replan: TypeAlias = Callable[[Specialisation, Arguments], Planned]
"""Plans a call as what is known by now of the gradients of its outputs asks for."""


class CalledAgain:
    """One planned call, to be run again if its backward is differentiated, or is another one.

    It runs what the call was captured from, on what the call was given, as long as all of that is
    what it was. The inputs are held for it until the backward has ended: a plan counts them.

    Parameters
    ----------
    captures : Captures
        What was captured of the callee.
    one : Specialisation
        The captured step.
    given : Arguments
        What the call was given.
    replan : callable
        Plans it for other gradients of outputs.
    """

    def __init__(
        self, captures: Captures, one: Specialisation, given: Arguments, replan: Replan
    ) -> None:
        self._captures = captures
        self._one = one
        self._replan = replan
        self._given = given
        guesses = bool(one.captured.joint.detached) and not captures.knows_outputs(one)
        draws = guesses and any(op.random_state_bytes for op in one.captured.graph.ops)
        self._before = GeneratorStates(captures.callee.modules) if draws else None
        self._as_they_were: list[Any] = []

    def noted(self, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
        """Note how the placeholders are once the forward has run; return what it has given."""
        self._as_they_were = _state_of(inputs)
        return outputs

    def plainly(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run the forward again; return its tensors, flattened, and those of the placeholders."""
        reason = _why_not(self._one, drawing=False) or self._what_changed()
        if reason is not None:
            raise _cannot(self._captures.callee.name, reason)
        captures, given = self._captures, self._given
        with torch.enable_grad():
            inputs = captures.inputs(self._one, given)
            output = captures.callee.function(*given.args, **given.kwargs)
        tensors, _ = structure_of(output, captures.callee.name)
        assert len(tensors) == len(self._one.captured.joint.outputs)
        return tensors, inputs

    def otherwise(self, came: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | None]:
        """Run the call with a plan for the gradients of outputs that came, drawing what it drew.

        Returns the gradients of placeholders.
        """
        reason = _why_not(self._one, drawing=self._before is not None) or self._what_changed()
        if reason is not None:
            raise unplanned(max(came), reason)
        given = self._given
        with torch.enable_grad():
            planned = self._replan(self._one, given)
            inputs = self._captures.inputs(self._one, given)
        if self._before is None:
            return gradients_at_once(planned, inputs, came)
        now = GeneratorStates(self._captures.callee.modules)
        self._before.restore()
        try:
            return gradients_at_once(planned, inputs, came)
        finally:
            now.restore()

    def _what_changed(self) -> str | None:
        """Return what keeps the call from being run as it was."""
        captures, given = self._captures, self._given
        with torch.enable_grad():
            if not captures.serves(self._one, given):
                return "modules or modes were changed since the call"
            if _state_of(captures.inputs(self._one, given)) != self._as_they_were:
                return (
                    "a parameter, buffer or input was changed since the call: change it after "
                    "backward"
                )
        return None


def _state_of(inputs: Sequence[Any]) -> list[Any]:
    """Return what shows whether tensors were changed in place or their memory replaced."""
    return [
        (x._version, x.data_ptr()) if isinstance(x, torch.Tensor) else x  # pyright: ignore
        for x in inputs
    ]


def _why_not(one: Specialisation, *, drawing: bool) -> str | None:
    """Return why a step cannot be run twice with the same result and no further effect.

    Parameters
    ----------
    drawing : bool
        Whether it can draw the same numbers twice.
    """
    captured, joint = one.captured, one.captured.joint
    if not drawing and any(op.random_state_bytes for op in captured.graph.ops):
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
