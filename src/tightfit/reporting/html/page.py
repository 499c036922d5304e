"""The page itself: text and tables, and the data that the script draws."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from jinja2 import Environment, FunctionLoader, StrictUndefined

from tightfit.graph.ir import Graph
from tightfit.plan.explain import Explanation, explain
from tightfit.plan.plan import Plan
from tightfit.reporting.groups import share_rows
from tightfit.reporting.html.facts import BudgetPoint, Measured, facts_of
from tightfit.reporting.html.sentences import ProvenBound, summary
from tightfit.units import format_bytes, format_percent, format_seconds
from tightfit.version import __version__

_ROWS = 12


@dataclass(frozen=True)
class Findings:
    """Findings about a plan, other than itself and its graph.

    `proven`: bounds of the least cost. `measured`: bytes that a real step held. `offsets`: where
    an arena puts each of `tightfit.plan.lives.lives_of`, in bytes; or none. `curve`: results for
    other budgets.
    """

    proven: ProvenBound | None = None
    measured: Measured | None = None
    offsets: Sequence[int] = ()
    curve: Sequence[BudgetPoint] = ()


def plan_page(graph: Graph, plan: Plan, findings: Findings, further: Sequence[str] = ()) -> bytes:
    """Return one HTML file about a plan, with all that it needs inside.

    `graph`, `plan`: the step, and a plan that passes `tightfit.plan.verify` on it. `further`:
    sentences to add to the three about the plan.
    """
    proven, measured, offsets = findings.proven, findings.measured, findings.offsets
    explained = explain(plan, graph)
    here = BudgetPoint(
        budget_bytes=plan.budget_bytes,
        overhead=explained.overhead,
        bound=None if proven is None else proven.bound,
        status="this plan",
    )
    others = [point for point in findings.curve if point.budget_bytes != plan.budget_bytes]
    facts = facts_of(graph, plan, measured=measured, offsets=offsets, curve=[*others, here])
    return filled_in(
        "page.html",
        title=f"{graph.name or 'A step'} within {format_bytes(plan.budget_bytes)}",
        sentences=(*summary(graph, explained, proven=proven, measured=measured), *further),
        figures=_figures(explained, proven, measured),
        device=graph.device.name or graph.device.kind,
        explained=explained,
        shares=share_rows(explained.modules)[:_ROWS],
        has_layout=bool(offsets),
        facts=facts,
        data=_embedded(msgspec.json.encode(facts)),
        **{name: _text_of(file) for name, file in _DRAWN_BY.items()},
    )


_DRAWN_BY = {"script": "script.js", "library": "echarts.min.js", "licence": "echarts.LICENSE"}
"""Files that become part of a page that a script draws on."""


def _figures(
    e: Explanation, proven: ProvenBound | None, measured: Measured | None
) -> tuple[tuple[str, str], ...]:
    """Return the numbers at the top, by their names."""
    rows = [
        ("budget", format_bytes(e.budget_bytes)),
        ("planned peak", format_bytes(e.peak_bytes)),
        ("measured peak", "" if measured is None else format_bytes(measured.peak_bytes)),
        ("plain PyTorch", format_bytes(e.eager_peak_bytes)),
        ("extra compute", format_percent(e.overhead)),
        ("proven least", "" if proven is None else format_percent(proven.bound)),
        ("computed again", f"{e.recomputed_ops} ops"),
    ]
    return tuple((name, text) for name, text in rows if text)


def _unbroken(text: str) -> str:
    """Return a text whose lines end neither between a number and its unit nor before a percent."""
    return re.sub(r"(?<=\d) (?=%|[KMGT]?i?B\b)", "\u00a0", text)


def _embedded(json: bytes) -> str:
    """Return JSON that ends no element that contains it."""
    return json.decode().replace("<", "\\u003c")


@cache
def _text_of(file: str) -> str:
    return files("tightfit.reporting.html").joinpath(file).read_text("utf-8")


def filled_in(file: str, **contents: Any) -> bytes:
    """Return a page of this folder with its contents, in the frame that all pages share.

    `contents`: by name in the template; a missing name is an error.
    """
    environment = Environment(
        loader=FunctionLoader(_text_of),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "percent": format_percent,
        "seconds": format_seconds,
        "unbroken": _unbroken,
    }
    page = environment.get_template(file)
    return page.render(style=_text_of("style.css"), version=__version__, **contents).encode()
