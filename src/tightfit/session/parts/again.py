"""How calls of parts are run again in their backward."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from tightfit.capture.captured import Captured, placeholder_tensors
from tightfit.capture.handed import GraphArguments
from tightfit.errors import TightfitError
from tightfit.execution.lower import Program
from tightfit.execution.replanned import Planned, unplanned
from tightfit.execution.returned import Returned
from tightfit.execution.runtime import Runner
from tightfit.progress import announce
from tightfit.session.outputs import OTHER_GRADIENTS, OTHER_STRIDES
from tightfit.session.parts.kinds import Kind, KnownCalls, Part, PartCall
from tightfit.session.parts.planning import StepPlans
from tightfit.session.step.observed import LedgerWriter
from tightfit.session.step.repeated import RepeatedCalls


@dataclass(frozen=True, eq=False)
class PartStep:
    """Program of a call of a part: the part is not held, as a buffer of it may hold the call."""

    part: weakref.ref[Part]
    kind: Kind  # the captured step
    key: Any  # of calls that are alike

    @property
    def captured(self) -> Captured:
        return self.kind.captured

    def leaves_of(self, positions: Sequence[int], leaves: int) -> set[int]:
        """Return which of so many flattened inputs placeholders are."""
        places = [*range(leaves), *self.kind.repeated]
        sources = (self.captured.joint.sources[p] for p in positions)
        return {places[source.index] for source in sources if source.kind in ("input", "base")}


class _Steps(Protocol):
    """The steps of a model in parts."""

    name: str
    known: KnownCalls
    plans: StepPlans

    @property
    def writer(self) -> LedgerWriter | None:
        """The writer of the ledger of the current step."""

    def captured_again(self, part: Part, given: GraphArguments) -> PartCall:
        """Capture a call."""

    def unmeasured(self) -> AbstractContextManager[None]:
        """Leave work to find the program of a call out of all steps."""


class PartRepeater:
    """Knows how parts of a model are run again.

    A call that is run again is one more call of its part in the current step: planned, measured.
    """

    def __init__(self, steps: _Steps) -> None:
        self._steps = weakref.ref(steps)
        self.name = steps.name

    def function(self, step: PartStep) -> Callable[..., Any]:
        """Return the object that runs the graphs of a part."""
        return self._part(step).function

    def modules(self, step: PartStep) -> Mapping[str, nn.Module]:
        return self._part(step).modules

    def inputs(self, step: PartStep, given: GraphArguments) -> list[Any]:
        leaves = step.kind.inputs(given.leaves)
        return placeholder_tensors(step.captured.joint, self._part(step).modules, leaves)

    def serves(self, step: PartStep, given: GraphArguments) -> bool:
        part = self._part(step)
        holds = step.kind.holds(given.leaves, part.modules)
        return holds and part.is_as_it_was(given, step.key)

    @property
    def repeated(self) -> RepeatedCalls:
        return self._living_steps().known

    def replanned(self, step: PartStep, given: GraphArguments) -> Planned:
        """Capture a call again, with the gradients that its outputs have, and plan it."""
        steps, part = self._living_steps(), self._part(step)
        call = steps.known.known(part, given) or steps.captured_again(part, given)
        if not _have_the_same_placeholders(call.kind, step.kind):
            late = step.captured.joint.detached - call.kind.captured.joint.detached
            raise unplanned(min(late, default=0), "an input is used differently")
        reason = OTHER_STRIDES if call.kind.captured.joint.other_strides else OTHER_GRADIENTS
        announce(f"{part.name}: {reason}: planned again")
        return self._planned(part, call.kind)

    def planned_once_more(self, step: PartStep, inputs: list[Any]) -> Planned:
        return self._planned(self._part(step), step.kind)

    def planned_forward(self, step: PartStep, inputs: list[Any]) -> Planned:
        return step.kind.runner(step.kind.least)

    def _planned(self, part: Part, kind: Kind) -> Planned:
        """Return a program of a call within the current step; the least plan where none is."""
        steps = self._living_steps()
        writer = steps.writer
        if writer is None:
            return kind.runner(kind.least)
        holding = steps.plans.holding_for(part, kind)
        return _Measured(kind.runner(holding), writer, writer.forward_begins(kind, holding, part))

    def _part(self, step: PartStep) -> Part:
        part = step.part()
        if part is None:
            raise self._gone()
        return part

    def _living_steps(self) -> _Steps:
        steps = self._steps()
        if steps is None:
            raise self._gone()
        return steps

    def _gone(self) -> TightfitError:
        return TightfitError(
            f"backward is to run a part of {self.name} again, and the model is gone, or fitted "
            "again. Way out: call it again"
        )


class _Measured(Planned):
    """Runs a plan at once, forward and backward, as a call of the current step.

    `call`: the number of the call, whose forward begins.
    """

    def __init__(self, runner: Runner, writer: LedgerWriter, call: int) -> None:
        self._runner = runner
        self._writer = writer
        self._call = call
        self.tangents = runner.tangents
        self.returned: Returned = runner.returned
        self.program: Program = dataclasses.replace(runner.program, forward=self._forward)

    def without_gradient(self, missing: frozenset[int]) -> frozenset[int]:
        """Return the placeholders that have no gradient where some outputs have none."""
        return self._runner.without_gradient(missing)

    def _forward(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        _, saved = self._runner.program.forward(inputs)
        del _  # outputs are not needed
        self._writer.forward_ended(self._call)
        self._writer.backward_begins(self._call)
        return [], saved


def _have_the_same_placeholders(one: Kind, other: Kind) -> bool:
    """Whether two captured steps have the same placeholders."""
    of_one, of_other = (
        [s for s in kind.captured.joint.sources if s.kind != "tangent"] for kind in (one, other)
    )
    return of_one == of_other and one.repeated == other.repeated
