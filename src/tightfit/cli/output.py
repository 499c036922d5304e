"""The output of commands: text for people or one JSON object, and the exit code."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tightfit.errors import BadInput
from tightfit.graph.ir import Graph
from tightfit.plan.explain import Explanation
from tightfit.plan.plan import Outcome, Plan
from tightfit.plan.simulate import Simulation
from tightfit.reporting.pictures.page import SUFFIXES, require_pictures
from tightfit.units import format_percent

FITS = 0
FAILED = 1
BAD_INPUT = 2
INFEASIBLE = 3
_EXIT_CODES = {"infeasible": INFEASIBLE, "oom": INFEASIBLE, "thrash": INFEASIBLE, "error": FAILED}

_KEYS = (
    "status",
    "budget_bytes",
    "constant_bytes",
    "planned_peak_bytes",
    "overhead",
    "bound",
    "gap",
    "minimum_budget_bytes",
    "seconds",
)


def print_result(text: str, *, as_json: bool, status: str, **numbers: Any) -> int:
    """Print the result of a command; return its exit code.

    `as_json`: print one JSON object instead. It always has the same keys, null where a command has
    nothing to say; a command may add others. `status`: ``"optimal"``, ``"feasible"``,
    ``"infeasible"``, or ``"error"`` for a proof that failed; of a simulation ``"ok"``, ``"oom"`` or
    ``"thrash"``.
    """
    if as_json:
        _print_json({**dict.fromkeys(_KEYS), "status": status, **numbers})
    else:
        print(text)
    return _EXIT_CODES.get(status, FITS)


def plan_numbers(graph: Graph, plan: Plan, result: Simulation | Explanation) -> dict[str, Any]:
    """Return what `print_result` prints of a plan that was replayed."""
    return {
        "budget_bytes": plan.budget_bytes,
        "constant_bytes": graph.constant_bytes,
        "planned_peak_bytes": result.peak_bytes,
        "overhead": result.overhead,
    }


def outcome_numbers(graph: Graph, outcome: Outcome) -> dict[str, Any]:
    """Return what `print_result` prints of the outcome of a search."""
    return {
        "constant_bytes": graph.constant_bytes,
        "planned_peak_bytes": None if outcome.plan is None else outcome.peak_bytes,
        "overhead": outcome.overhead,
        "bound": outcome.bound,
        "gap": outcome.gap,
    }


def print_error(
    message: str, *, as_json: bool, code: int, status: str = "error", **numbers: Any
) -> int:
    """Print why a command failed, as JSON on the output or as text on the error output."""
    if as_json:
        _print_json({"status": status, "message": message, **numbers})
    else:
        print(f"tightfit: {message}", file=sys.stderr)
    return code


def check_output(output: Path | None, suffixes: Sequence[str]) -> None:
    """Refuse a file for rows or their picture before any work is done for it.

    `suffixes`: of files with rows; the suffixes of pictures are added here. Raises `BadInput` if
    its name has another ending. Raises `MissingExtra` if it is a picture and none can be drawn
    here.
    """
    if output is None:
        return
    *known, last = *suffixes, *SUFFIXES
    if output.suffix not in (*known, last):
        raise BadInput(f"--output {str(output)!r} must end in {', '.join(known)} or {last}")
    if output.suffix in SUFFIXES:
        require_pictures()


def percent_or_dash(fraction: float | None) -> str:
    """Return a fraction as percent, and a dash where there is none."""
    return "-" if fraction is None else format_percent(fraction)


def _print_json(fields: dict[str, Any]) -> None:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in fields.items()
    }
    print(json.dumps(finite))


def csv_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    """Return rows as comma-separated values with a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=columns)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()
