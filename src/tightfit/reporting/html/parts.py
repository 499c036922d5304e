"""The page about a model that is planned in parts: its plans, their saved bytes and costs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tightfit.graph.ir import Graph
from tightfit.plan.assemble import everything_kept
from tightfit.plan.explain import Explanation, PlannedPart, explain
from tightfit.plan.plan import Plan
from tightfit.reporting.groups import ShareRow, share_rows
from tightfit.reporting.html.page import filled_in
from tightfit.reporting.html.sentences import as_measured
from tightfit.units import format_bytes, format_percent

_ROWS = 8


class WholeStep(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the step that the parts make: bytes with constants, a fraction of cost."""

    budget_bytes: int
    planned_peak_bytes: int
    measured_peak_bytes: int | None
    overhead: float
    cost_source: str


class _Shown(msgspec.Struct, frozen=True):
    """A row of the table and the section it leads to."""

    name: str
    calls: int
    kept_bytes: int
    plain_bytes: int
    explained: Explanation
    shares: tuple[ShareRow, ...]


def parts_page(step: WholeStep, parts: Sequence[PlannedPart]) -> bytes:
    """Return one HTML file about the plans of a model in parts.

    `step`: what all plans promise together, and what was measured. `parts`: each with a plan that
    passes `tightfit.plan.verify` on its graph.
    """
    shown = tuple(map(_shown, parts))
    measured = step.measured_peak_bytes
    rows = [
        ("budget", format_bytes(step.budget_bytes)),
        ("planned peak", format_bytes(step.planned_peak_bytes)),
        ("measured peak", "" if measured is None else format_bytes(measured)),
        ("extra compute", format_percent(step.overhead)),
        ("calls of parts", str(sum(part.calls for part in parts))),
        ("plans", str(len(parts))),
    ]
    return filled_in(
        "parts.html",
        title=f"A model in parts within {format_bytes(step.budget_bytes)}",
        sentences=_sentences(step, shown),
        figures=[(name, number) for name, number in rows if number],
        parts=shown,
    )


def _shown(part: PlannedPart) -> _Shown:
    explained = explain(part.plan, part.graph)
    return _Shown(
        name=part.name,
        calls=part.calls,
        kept_bytes=_kept_bytes(part.graph, part.plan),
        plain_bytes=_kept_bytes(part.graph, everything_kept(part.graph, part.plan.gradients)),
        explained=explained,
        shares=share_rows(explained.modules)[:_ROWS],
    )


def _kept_bytes(graph: Graph, plan: Plan) -> int:
    """Return bytes of a call at the end of its forward, without its constants."""
    phases = explain(plan, graph).phases
    forward = next((phase for phase in phases if phase.phase == "forward"), None)
    return 0 if forward is None else max(0, forward.end_bytes - graph.constant_bytes)


def _sentences(step: WholeStep, parts: Sequence[_Shown]) -> tuple[str, str, str]:
    calls = sum(part.calls for part in parts)
    kept = sum(part.calls * part.kept_bytes for part in parts)
    plain = sum(part.calls * part.plain_bytes for part in parts)
    measured = as_measured(step.measured_peak_bytes)
    return (
        "The model allows no single graph, so its parts are planned one by one, within one budget: "
        f"a step like the last one holds at most {format_bytes(step.planned_peak_bytes)} of "
        f"{format_bytes(step.budget_bytes)}{measured}.",
        f"Its {calls} calls of parts keep {format_bytes(kept)} for their backward, where plain "
        f"PyTorch keeps {format_bytes(plain)}.",
        f"This costs {format_percent(step.overhead)} more computing time in the parts (costs of "
        f"operators: {step.cost_source}); nothing is proven of the least possible across parts.",
    )
