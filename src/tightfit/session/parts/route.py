"""The code common to all ways to run a callable in parts."""

from __future__ import annotations

import msgspec

from tightfit.dynamo.outside import Outside
from tightfit.execution.guard import Guard, StepPeaks
from tightfit.execution.runtime import Run
from tightfit.session.options import Options
from tightfit.session.parts.steps import PartSteps
from tightfit.session.report import Report


class PartsRoute:
    """A way to run a callable whose steps consist of planned parts.

    `outside`: notes frames that run as plain Python.
    """

    is_used = True

    def __init__(self, options: Options, steps: PartSteps, outside: Outside) -> None:
        self.options = options
        self.steps = steps
        self.outside = outside

    @property
    def guard(self) -> Guard:
        return self.steps.guard

    @property
    def waiting(self) -> list[Run]:
        """No call has to wait for another's backward: a step may be several calls."""
        return []

    def outside_of_plans(self) -> bool:
        return self.outside.is_called_within()

    def settle(self) -> None:
        """End the current step, so that the report is of it."""
        self.close_step()

    def report(self) -> Report:
        return msgspec.structs.replace(self.steps.report(), outside=self.outside.reasons())

    def close_step(self) -> StepPeaks | None:
        return self.steps.close_step()

    def needed_bytes(self) -> int:
        return self.steps.needed_bytes()

    def change_options(self, options: Options) -> None:
        self.options = options
        self.steps.change_options(options)
