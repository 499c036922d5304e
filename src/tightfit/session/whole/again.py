"""How calls of whole steps are run again in their backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from tightfit.capture.handed import GraphArguments
from tightfit.errors import TightfitError
from tightfit.execution.replanned import Planned
from tightfit.session.step.repeated import RepeatedCalls
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.specialisation import Specialisation

Replan: TypeAlias = Callable[[Specialisation, GraphArguments], Planned]
"""Plans a call whose outputs have other gradients than expected."""

PlanOnceMore: TypeAlias = Callable[[Specialisation, list[Any]], Planned]
"""Plans a call for a further backward, with memory held now."""


class StepRepeater:
    """Runs whole steps of a callee again; see `session.step.again.CallRepeater`."""

    def __init__(
        self,
        captures: Captures,
        replan: weakref.ref[Replan],
        plan_once_more: weakref.ref[PlanOnceMore],
    ) -> None:
        self._captures = captures
        self._replan = replan
        self._plan_once_more = plan_once_more

    @property
    def name(self) -> str:
        return self._captures.callee.name

    def function(self, step: Specialisation) -> Callable[..., Any]:
        return self._captures.callee.function

    def modules(self, step: Specialisation) -> Mapping[str, nn.Module]:
        return self._captures.callee.modules

    def inputs(self, step: Specialisation, given: GraphArguments) -> list[Any]:
        return self._captures.inputs(step, given)

    def serves(self, step: Specialisation, given: GraphArguments) -> bool:
        return self._captures.serves(step, given)

    @property
    def repeated(self) -> RepeatedCalls:
        return self._captures

    def replanned(self, step: Specialisation, given: GraphArguments) -> Planned:
        return self._alive(self._replan)(step, given)

    def planned_once_more(self, step: Specialisation, inputs: list[Any]) -> Planned:
        return self._alive(self._plan_once_more)(step, inputs)

    def planned_forward(self, step: Specialisation, inputs: list[Any]) -> Planned:
        return self.planned_once_more(step, inputs)

    def _alive(self, reference: weakref.ref[Callable[..., Planned]]) -> Callable[..., Planned]:
        found = reference()
        if found is None:
            raise TightfitError(
                f"backward is to plan a step of {self.name} again, and the model is gone. Way "
                "out: keep a reference to it until then"
            )
        return found
