"""A planned call that can be run again in its backward, where its plan does not do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias, TypeVar

import torch

from tightfit.capture.calls.structure import Arguments, structure_of
from tightfit.capture.side_effects.generators import GeneratorStates
from tightfit.capture.updates import decided_by_updates
from tightfit.errors import WITHOUT_A_PLAN, TightfitError
from tightfit.execution.otherwise import Planned, gradients_at_once, gradients_in_turn, unplanned
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.specialisation import Specialisation
from tightfit.torch_private import tools

__all__ = ["CalledAgain", "PlanOnceMore", "Replan"]

_T = TypeVar("_T")

Replan: TypeAlias = Callable[[Specialisation, Arguments], Planned]
"""Plans a call as what is known by now of the gradients of its outputs asks for."""

PlanOnceMore: TypeAlias = Callable[[Specialisation, list[Any]], Planned]
"""Plans a call for what is held now."""


class CalledAgain:
    """One planned call, to be run again if its backward is differentiated, or not the only one.

    It runs what the call was captured from, on what the call was given, as long as all of that is
    what it was. The inputs are held for it until the backward has ended: a plan counts them. The
    model is not held: its buffers may hold this call.

    Parameters
    ----------
    captures : Captures
        What was captured of the callee.
    one : Specialisation
        The captured step.
    given : Arguments
        What the call was given.
    replan : weakref.ref of callable
        Plans it for other gradients of outputs.
    plan_once_more : weakref.ref of callable
        Plans it, on tensors, for one backward more.
    """

    def __init__(
        self,
        captures: Captures,
        one: Specialisation,
        given: Arguments,
        replan: weakref.ref[Replan],
        plan_once_more: weakref.ref[PlanOnceMore],
    ) -> None:
        self._name = captures.callee.name
        self._found = weakref.ref(captures)
        self._one = one
        self._replan = replan
        self._plan_once_more = plan_once_more
        self._given = given
        remembers = captures.may_repeat(one) and _draws(one)
        self._before = GeneratorStates(captures.callee.modules) if remembers else None
        self._as_they_were: list[Any] = []

    @property
    def _captures(self) -> Captures:
        """What was captured of the callee.

        Raises
        ------
        TightfitError
            If the callee is gone.
        """
        return self._there(self._found)

    def _there(self, reference: weakref.ref[_T]) -> _T:
        found = reference()
        if found is None:
            raise TightfitError(
                f"backward is to run a step of {self._name} again (create_graph=True, "
                "retain_graph=True, or an output that had no gradient before), and the model is "
                "gone. Way out: keep a reference to it until then"
            )
        return found

    def noted(self, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
        """Note how the placeholders are once the forward has run; return what it has given."""
        self._as_they_were = _state_of(inputs)
        return outputs

    def plainly(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run the forward again; return its tensors, flattened, and those of the placeholders."""
        reason = _why_not_plainly(self._one) or self._what_changed()
        if reason is not None:
            raise _cannot(self._captures.callee.name, reason)
        captures, given = self._captures, self._given
        with torch.enable_grad(), tools.WithoutDynamo():
            inputs = captures.inputs(self._one, given)
            output = captures.callee.function(*given.args, **given.kwargs)
        tensors, _ = structure_of(output, captures.callee.name)
        assert len(tensors) == self._one.captured.joint.metadata.num_outputs
        return tensors, inputs

    def otherwise(self, came: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | None]:
        """Run the call with a plan for the gradients of outputs that came, drawing what it drew.

        What it writes goes into copies: it has been written. Returns the gradients of
        placeholders.
        """
        reason = self._why_not_once_more()
        if reason is not None:
            raise unplanned(max(came), reason)
        with torch.enable_grad():
            planned = self._there(self._replan)(self._one, self._given)
            inputs = self._inputs_once_more()
        return self._drawing_the_same(lambda: gradients_at_once(planned, inputs, came))

    def once_more(self, came: dict[int, torch.Tensor]) -> Iterator[dict[int, torch.Tensor | None]]:
        """Run the call with its plan for a further backward, drawing what it drew.

        What it writes goes into copies: it has been written. Returns what runs the backward and
        yields the gradients of placeholders.
        """
        self._captures.note_repeated(self._one)
        reason = self._why_not_once_more()
        if reason is not None:
            raise _only_once(self._captures.callee.name, reason)
        with torch.enable_grad():
            inputs = self._inputs_once_more()
            planned = self._there(self._plan_once_more)(self._one, inputs)
        return self._drawing_the_same(lambda: gradients_in_turn(planned, inputs, came))

    def _why_not_once_more(self) -> str | None:
        """Return why the planned forward cannot be run twice with the same gradients."""
        joint = self._one.captured.joint
        if self._before is None and _draws(self._one):
            return "its forward drew random numbers, which are kept from the next call on"
        if joint.opaque.changes_state:
            return "an opaque module writes its state"
        if read := decided_by_updates(joint):
            return f"its forward writes {read[0]} and reads it, too"
        return self._what_changed(besides={position for _, position in joint.write_backs})

    def _inputs_once_more(self) -> list[Any]:
        """Return the placeholders; what is written has been written, and is a copy."""
        inputs = list(self._captures.inputs(self._one, self._given))
        for _, position in self._one.captured.joint.write_backs:
            inputs[position] = inputs[position].detach().clone()
        return inputs

    def _drawing_the_same(self, run: Callable[[], _T]) -> _T:
        """Run something with the random numbers that the call has drawn."""
        if self._before is None:
            return run()
        now = GeneratorStates(self._captures.callee.modules)
        self._before.restore()
        try:
            return run()
        finally:
            now.restore()

    def _what_changed(self, besides: Set[int] = frozenset()) -> str | None:
        """Return what keeps the call from being run as it was; some placeholders do not count."""
        captures, given = self._captures, self._given
        with torch.enable_grad():
            if not captures.serves(self._one, given):
                return "modules or modes were changed since the call"
            now = _state_of(captures.inputs(self._one, given))
            pairs = enumerate(zip(now, self._as_they_were, strict=True))
            if any(one != other for i, (one, other) in pairs if i not in besides):
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


def _draws(one: Specialisation) -> bool:
    """Whether a step draws random numbers."""
    return any(op.random_state_bytes for op in one.captured.graph.ops)


def _why_not_plainly(one: Specialisation) -> str | None:
    """Return why a forward cannot be run twice with the same result and no further effect."""
    joint = one.captured.joint
    if _draws(one):
        return "its forward draws random numbers"
    if joint.write_backs or joint.opaque.changes_state:
        return "its forward writes buffers or inputs"
    return "it returns numbers" if joint.structure.numbers else None


def _only_once(name: str, reason: str) -> TightfitError:
    return TightfitError(
        f"backward runs through a step of {name} a further time (retain_graph=True): for that its "
        f"forward is run again, and here it cannot be, as {reason}. Call the model again, or sum "
        f"the losses and call backward once. {WITHOUT_A_PLAN}"
    )


def _cannot(name: str, reason: str) -> TightfitError:
    return TightfitError(
        f"the backward of {name} is to be differentiated itself (create_graph=True): for that its "
        f"forward is run again, plainly, and here it cannot be, as {reason}. Take the derivative "
        "inside of what is planned (tightfit.step), leave the part that needs it out of the fitted "
        f"module, or tightfit.unfit(model) first. {WITHOUT_A_PLAN}"
    )
