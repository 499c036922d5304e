"""Write the HTML page about a plan: lay its memory out, draw everything, one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tightfit.errors import BadInput
from tightfit.files import write_atomically
from tightfit.graph.ir import Graph
from tightfit.layout.pack import blocks_of_plan, pack
from tightfit.layout.packers.base import PackingLimits
from tightfit.plan.explain import PlannedPart
from tightfit.plan.plan import Plan
from tightfit.reporting.html.facts import BudgetPoint, Measured
from tightfit.reporting.html.page import Findings, plan_page
from tightfit.reporting.html.parts import WholeStep, parts_page
from tightfit.reporting.html.sentences import ProvenBound

_PACKING_S = 2.0


def check_page(path: Path | str) -> Path:
    """Return the path of a page; refuse it before any work is done for it.

    Raises `BadInput` if it does not end in .html, or its folder does not exist.
    """
    path = Path(path)
    if path.suffix != ".html":
        raise BadInput(f"a report is an HTML page: give a name that ends in .html, not {path.name}")
    if not path.parent.is_dir():
        raise BadInput(f"the folder {path.parent} for the report does not exist: create it first")
    return path


def write_page(
    path: Path | str,
    graph: Graph,
    plan: Plan,
    *,
    proven: ProvenBound | None = None,
    measured: Measured | None = None,
    curve: Sequence[BudgetPoint] = (),
    further: Sequence[str] = (),
) -> Path:
    """Write one HTML file about a valid plan; return its path.

    `measured`: bytes that a real step held. `curve`: plans found for other budgets. `further`:
    sentences to add to those about the plan. Raises `BadInput` if the file cannot be written there.
    """
    path = check_page(path)
    packed = pack(blocks_of_plan(graph, plan), limits=PackingLimits(seconds=_PACKING_S))
    findings = Findings(proven, measured, packed.layout.offsets, curve)
    write_atomically(path, plan_page(graph, plan, findings, further))
    return path


def write_parts_page(path: Path | str, step: WholeStep, parts: Sequence[PlannedPart]) -> Path:
    """Write one HTML file about the plans of a model in parts; return its path."""
    path = check_page(path)
    write_atomically(path, parts_page(step, parts))
    return path
