"""What the papers claim, checked on the rows of the comparison: rounding, speed, solver times."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.documents import table
from benchmarks.rows import Row

__all__ = ["rounding_parts", "solver_parts", "speed_parts"]

MONET_HOURS = {
    ("resnet50", "checkmate"): {6: 8.96, 7: 12.01, 8: 10.78, 9: 4.54, 10: 2.98},
    ("resnet50", "monet"): {5: 1.18, 6: 0.46, 7: 0.14, 8: 0.09, 9: 0.06, 10: 0.07},
    ("unet", "checkmate"): {5: 0.149, 6: 0.031, 7: 0.022, 8: 0.020, 9: 0.010, 10: 0.009},
    ("unet", "monet"): {5: 0.048, 6: 0.002, 7: 0.002, 8: 0.002, 9: 0.002, 10: 0.002},
    ("vgg16", "checkmate"): {8: 0.002, 9: 0.002, 10: 0.001},
    ("vgg16", "monet"): {8: 0.001, 9: 0.0, 10: 0.0},
}
"""MONeT, table 5: hours to a gap of 5 % by GB of the budget (monet: MONeT-NoOp)."""


def rounding_parts(rows: Sequence[Row]) -> list[str]:
    """How close two-phase rounding comes to the optimum: Checkmate's section 6.4 and table 2."""
    body: list[list[str]] = []
    for graph, ratio in cells(rows):
        optimum = proven(rows, graph, ratio, ("checkmate", "checkmate+"))
        rounded = only(rows, graph, ratio, "checkmate_rounding")
        if optimum is None or rounded is None:
            continue
        found = rounded["overhead_percent"]
        close = "-" if found is None else f"{(100 + found) / (100 + optimum):.3f}"
        shown = "no plan" if found is None else f"{found:.2f}"
        bound = f"{rounded['bound_percent']:.2f}"
        body.append([graph, f"{ratio:g}", bound, f"{optimum:.2f}", shown, close])
    if not body:
        return []
    return [
        "## How close rounding comes",
        "Costs of the best rounded plan over those of the optimum. Checkmate reports 1.06 times "
        "the optimum on its models and budgets; these graphs have one node per operator, forward "
        "and backward, and tight budgets, where few roundings fit.",
        table(["graph", "budget", "relaxation %", "optimum %", "rounded %", "times"], body),
    ]


def speed_parts(rows: Sequence[Row]) -> list[str]:
    """The default planner against the fastest exact one that proves its optimum by itself."""
    body: list[list[str]] = []
    exact = ("checkmate", "checkmate:split", "monet", "monet:loose", "intervals")
    for graph, ratio in cells(rows):
        ours = only(rows, graph, ratio, "anytime")
        closed = [
            row
            for planner in exact
            if (row := only(rows, graph, ratio, planner)) is not None and row["status"] == "optimal"
        ]
        if ours is None or ours["overhead_percent"] is None or not closed:
            continue
        noted = all("processor_s" in row for row in (ours, *closed))
        clock = "processor_s" if noted else "seconds"
        fastest = min(closed, key=lambda row: row[clock])
        best = min(row["overhead_percent"] for row in closed)
        body.append(
            [
                graph,
                f"{ratio:g}",
                f"{ours['overhead_percent']:.2f} ({ours[clock]:.1f})",
                f"{best:.2f}",
                f"{fastest['planner']} ({fastest[clock]:.1f})",
                f"{fastest[clock] / max(0.01, ours[clock]):.1f}",
                "processor" if noted else "wall",
            ]
        )
    if not body:
        return []
    return [
        "## The default planner and the exact ones that close their gap",
        "Overhead in percent and seconds until the proof, of processor time where all rows have it "
        "and else of wall time under different loads. The exact planners prove less: the optimum "
        "of their own search space, without the choice among alternatives.",
        table(
            ["graph", "budget", "default (s)", "best exact", "fastest (s)", "times", "clock"], body
        ),
    ]


def solver_parts(rows: Sequence[Row]) -> list[str]:
    """Solver times: MONeT's table 5."""
    body: list[list[str]] = []
    for graph, ratio in cells(rows):
        for planner in ("checkmate", "monet"):
            row = only(rows, graph, ratio, planner)
            if row is None:
                continue
            gigabytes = row["budget_bytes"] / 1e9
            hours = MONET_HOURS.get((graph, planner), {}).get(round(gigabytes))
            gap = (
                "no plan"
                if row["overhead_percent"] is None
                else f"{row['overhead_percent'] - row['bound_percent']:.2f}"
            )
            processor = f"{row['processor_s']:.1f}" if "processor_s" in row else "not noted"
            theirs = "-" if hours is None else f"{3600 * hours:,.0f}"
            seconds = f"{row['seconds']:.1f}"
            body.append([graph, f"{gigabytes:.1f}", planner, seconds, processor, gap, theirs])
    if not body:
        return []
    return [
        "## Solver times",
        "Seconds until a gap of 0.01 points is proven or time is up, on one thread of HiGHS. Next "
        "to it the paper's seconds to a gap of 5 % at the same budget rounded to GB (MONeT, "
        "table 5, its monet row is MONeT-NoOp), on Gurobi. Ours add the memory rows of a stage "
        "when a solution violates them, and plan for constants besides the activations.",
        table(
            ["graph", "GB", "program", "seconds", "processor s", "gap in points", "paper: s"],
            body,
        ),
    ]


def cells(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """The graphs and budgets of a comparison, in order."""
    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    return sorted(
        {(row["graph"], row["ratio"]) for row in rows},
        key=lambda cell: (graphs.index(cell[0]), cell[1]),
    )


def only(rows: Sequence[Row], graph: str, ratio: float, planner: str) -> Row | None:
    """The row of a planner at a budget, if it has run."""
    key = (graph, ratio, planner)
    found = [row for row in rows if (row["graph"], row["ratio"], row["planner"]) == key]
    return found[-1] if found else None


def proven(rows: Sequence[Row], graph: str, ratio: float, planners: Sequence[str]) -> float | None:
    """The overhead in percent that one of these planners has proven optimal."""
    found = (only(rows, graph, ratio, planner) for planner in planners)
    return next((r["overhead_percent"] for r in found if r and r["status"] == "optimal"), None)
