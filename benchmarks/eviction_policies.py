"""Policies compared with the plan that knows the whole program, in bytes and in an arena.

python benchmarks/eviction_policies.py [--data ../shared/data] [--seconds 20]

Writes ``benchmarks/results/eviction_policies.jsonl`` and ``docs/policies.md``.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from benchmarks.documents import table
from benchmarks.rows import Row, read_rows, write_rows
from support.logs import DATA
from tightfit.eviction.log.resolve import load_log
from tightfit.eviction.policies.registry import POLICIES
from tightfit.eviction.replayed import Rules
from tightfit.eviction.simulator import Simulator
from tightfit.files import write_atomically
from tightfit.planners.base import Limits
from tightfit.planners.questions.clairvoyant import CLAIRVOYANT, clairvoyant, slowdown_of
from tightfit.units import format_bytes

__all__ = ["document"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "eviction_policies.jsonl"
PAGE = ROOT / "docs" / "policies.md"

LOGS = ("resnet32", "unet", "transformer", "treelstm")
RATIOS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)
LINES = ("h_dtr_eq", "h_dtr", "msps", "improved", "improved_ancestors", "improved_exact")
IN_ARENA = (
    ("h_dtr_eq", "arena"),
    ("improved", "arena"),
    ("improved", "neighbours"),
    ("improved", "window"),
    ("improved", "mixed"),
    ("improved_ancestors", "mixed"),
)


def rows_of(data: Path, seconds: float) -> Iterator[Row]:
    """Yield a row per log, line and ratio."""
    for name in LOGS:
        simulator = Simulator(load_log(data / "dtr_logs" / f"{name}.log.gz"))
        for line, placement in [*((line, "bytes") for line in LINES), *IN_ARENA]:
            for ratio in RATIOS:
                found = simulator.simulate(
                    POLICIES[line], simulator.budget_at(ratio), Rules(placement=placement)
                )
                cost = found.total_cost_ns / simulator.log.base_cost_ns
                yield {
                    "log": name,
                    "line": line,
                    "placement": placement,
                    "ratio": ratio,
                    "status": found.status,
                    "slowdown": round(cost, 4) if found.status == "ok" else None,
                }
        for ratio in RATIOS:
            yield {
                "log": name,
                "line": CLAIRVOYANT,
                "placement": "bytes",
                "ratio": ratio,
                **_best(simulator, ratio, seconds),
            }


def _best(simulator: Simulator, ratio: float, seconds: float) -> Row:
    outcome = clairvoyant(simulator.log, simulator.budget_at(ratio), Limits(seconds=seconds))
    if outcome.plan is None:
        return {"status": outcome.status, "slowdown": None, "bound": None}
    return {
        "status": "ok",
        "slowdown": round(slowdown_of(simulator.log, outcome.overhead), 4),
        "bound": round(slowdown_of(simulator.log, outcome.bound), 4),
        "seconds": round(outcome.seconds, 1),
    }


def document(rows: Sequence[Row]) -> str:
    """Return the page for the rows."""
    parts = [
        "# Eviction policies, measured",
        "Logs of one training step each, recorded by the authors of DTR on a GPU, replayed by "
        "`tightfit simulate` ([simulator.md](simulator.md)). Numbers are time computed as a "
        "multiple of the program's own, at budgets that are shares of its peak. `thr`: thrashing, "
        "more than twice; `oom`: nothing left to evict. *clairvoyant* is the default planner's "
        "plan of the same program, which knows the future; `none`: proven that there is no plan, "
        "`-`: none found. It keeps results of the program from their first computation on, which a "
        "policy need not do. Rows: `python benchmarks/eviction_policies.py`.",
    ]
    for name in LOGS:
        parts += [f"## {name}", _table(rows, name, lines=[(x, "bytes") for x in _LINES])]
    parts += [
        "## In an arena",
        "The budget is one range of addresses and an eviction must make a hole in it. "
        "*arena*: evict until there is one. *neighbours*: a score's bytes count the holes next to "
        "the storage. *window* (Coop): the neighbours that cost least are evicted together. "
        "*mixed*: neighbours, and the window where enough bytes are free in all.",
    ]
    for name in LOGS:
        parts += [f"### {name}", _table(rows, name, lines=IN_ARENA)]
    parts.append(
        "## On static graphs\n\nFigure 3 of the paper: what the policies find, knowing nothing, "
        "with planners that know the graph. Overhead in percent / seconds of planning, two at a "
        "time on two shared cores; P100 costs, budgets as shares of the activation peak: "
        f"`tightfit compare zoo:NAME {_COMPARED} --costs p100 --planners "
        f"{','.join(_PLANNERS)} --time-limit 20`. `none`: proven that there is no plan, `-`: none "
        "found. A recurrent network with the gradients of its shared weights added in place "
        "(`zoo:lstm`) is refused by the papers' planners and by these; `lstm` expands its weights.",
    )
    for name, setting in COMPARED.items():
        parts += [f"### {name}, `{setting}`", _compared(name)]
    return "\n\n".join(parts) + "\n"


_LINES = (*LINES, CLAIRVOYANT)
_COMPARED = "SETTING --budgets 0.9,0.8,0.7,0.6,0.5,0.4"
_PLANNERS = (
    "anytime",
    "checkmate_rounding",
    "eviction",
    "eviction:h_dtr_eq",
    "eviction:h_dtr_local",
    "eviction:lru",
    "ap_sqrt",
    "ap_greedy",
)
COMPARED = {
    "vgg16": "--batch 176 --size 224",
    "unet": "--setting monet",
    "lstm": "benchmarks/expanded_lstm.py:expanded_lstm, --time-limit 8",
}
"""Models whose rows ``tightfit compare -o`` has written to ``results/eviction_compare_*.csv``."""


def _compared(name: str) -> str:
    with (RESULTS.parent / f"eviction_compare_{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    budgets = sorted({int(row["budget_bytes"]) for row in rows}, reverse=True)
    found = {(row["planner"], int(row["budget_bytes"])): row for row in rows}
    body = [
        [planner, *(_percent_and_seconds(found[planner, budget]) for budget in budgets)]
        for planner in _PLANNERS
    ]
    return table(["planner", *(format_bytes(budget) for budget in budgets)], body)


def _percent_and_seconds(row: dict[str, str]) -> str:
    if not row["overhead"]:
        return "none" if row["status"] == "infeasible" else "-"
    return f"{100 * float(row['overhead']):.2f} / {float(row['seconds']):.2f}"


def _table(rows: Sequence[Row], log: str, lines: Sequence[tuple[str, str]]) -> str:
    found = {
        (row["line"], row["placement"], row["ratio"]): row for row in rows if row["log"] == log
    }
    body = [
        [
            line if placement == "bytes" else f"{line}, {placement}",
            *(_cell(found[line, placement, ratio]) for ratio in RATIOS),
        ]
        for line, placement in lines
    ]
    return table(["policy", *map(str, RATIOS)], body)


def _cell(row: Row) -> str:
    if row["slowdown"] is not None:
        return f"{row['slowdown']:.3f}"
    return {"thrash": "thr", "oom": "oom", "infeasible": "none"}.get(row["status"], "-")


def main() -> None:
    """Measure, and write rows and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--page-only", action="store_true", help="write the page of known rows")
    given = parser.parse_args()
    if given.page_only:
        rows = read_rows(RESULTS)
    else:
        rows = list(rows_of(given.data, given.seconds))
        write_rows(RESULTS, rows)
    write_atomically(PAGE, document(rows).encode())


if __name__ == "__main__":
    main()
