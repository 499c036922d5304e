"""The report on a fitted model: as numbers, as two lines and as a page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tightfit.api.pages import write_page, write_parts_page
from tightfit.errors import BadInput
from tightfit.execution.guard import StepPeaks
from tightfit.graph.ir import Graph
from tightfit.reporting.html.facts import Measured
from tightfit.reporting.html.parts import WholeStep
from tightfit.reporting.html.sentences import ProvenBound
from tightfit.session import report as of_session
from tightfit.session.fitted import Fitted
from tightfit.session.whole.less_exact import planned_less_exactly
from tightfit.session.whole.steps import WholeSteps
from tightfit.units import format_bytes, format_seconds


class Report(of_session.Report, frozen=True, kw_only=True):
    """Promises of the current plan and bytes held by the last step, with the step itself.

    Parameters
    ----------
    graph : Graph or None
        The step that was planned; None where parts are planned one by one.
    bound_source : str
        The method that proves the bound.
    """

    graph: Graph | None = None
    bound_source: str = ""

    def html(self, path: Path | str) -> Path:
        """Write one offline HTML page about the plan, or the plans of parts; return its path.

        Raises
        ------
        BadInput
            If the file cannot be written.
        """
        if self.graph is None or self.plan is None:
            return write_parts_page(path, self._whole_step(), self.parts)
        return write_page(
            path,
            self.graph,
            msgspec.structs.replace(self.plan, budget_bytes=self.budget_bytes),
            proven=ProvenBound(self.bound, self.bound_source),
            measured=None if self.measured is None else _measured(self.measured),
            further=self._further(),
        )

    def _further(self) -> tuple[str, ...]:
        """Return additions to the sentences of the page."""
        further: list[str] = []
        if self.reserved_bytes is not None:
            further.append(
                f"The GPU's allocator has reserved {format_bytes(self.reserved_bytes)} for it, of "
                f"the budget of {format_bytes(self.budget_bytes)}."
            )
        if self.measured_moves is not None:
            waited = format_seconds(self.measured_moves.stall_s)
            further.append(f"In the last step operators waited {waited} for far memory.")
        if self.next_exactness is not None:
            further.append(self.next_exactness.sentence)
        return tuple(further)

    def _whole_step(self) -> WholeStep:
        return WholeStep(
            budget_bytes=self.budget_bytes,
            planned_peak_bytes=self.planned_peak_bytes,
            measured_peak_bytes=self.measured_peak_bytes,
            overhead=self.overhead,
            cost_source=self.cost_source,
        )


def reported(fitted: Fitted, *, next_exactness: bool = False) -> Report:
    """Return the report on a fitted model or step.

    `next_exactness`: whether to find out the gain of the next, less exact class of alternatives.
    Raises `BadInput` if nothing has been planned yet, or that gain cannot be found out.
    """
    known = msgspec.structs.asdict(fitted.report())
    if next_exactness:
        if not isinstance(fitted.route, WholeSteps):
            raise BadInput(
                "next_exactness exists for steps that are planned as a whole; this step is planned "
                "part by part"
            )
        known["next_exactness"] = planned_less_exactly(fitted.route)
    last = None if fitted.is_in_parts else fitted.last
    if last is None:
        return Report(**known)
    return Report(**known, graph=last.graph, bound_source=last.outcome.bound_source)


def _measured(step: StepPeaks) -> Measured:
    constants = step.constant_bytes
    return Measured(
        forward_bytes=constants + step.forward_bytes,
        between_bytes=constants + step.between_bytes,
        backward_bytes=constants + step.backward_bytes,
        after_bytes=constants + step.after_bytes,
    )
