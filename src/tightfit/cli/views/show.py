"""``tightfit show``: explain a plan or a graph."""

from __future__ import annotations

import time

import msgspec

from tightfit.cli.options import Json, OtherCosts
from tightfit.cli.output import plan_numbers, print_result
from tightfit.cli.target import load_target
from tightfit.errors import BadInput
from tightfit.files import kind_of_record, read_limited
from tightfit.graph.ir import Graph
from tightfit.plan.assemble import everything_kept
from tightfit.plan.explain import explain
from tightfit.plan.io import plan_from_json
from tightfit.plan.plan import Plan
from tightfit.plan.verify import verify
from tightfit.reporting.text import render_explanation, render_graph, render_plan


def show(
    file: str, graph: str | None = None, /, *, costs: OtherCosts = None, json: Json = False
) -> int:
    """Print the memory a graph needs, or the memory and overhead of a plan.

    ```sh
    tightfit show graph.json
    tightfit show plan.json graph.json
    ```

    Parameters
    ----------
    file
        A plan or graph file (.json or .json.gz).
    graph
        The graph file of a plan: verifies the plan and names the holders of memory.
    """
    started = time.perf_counter()
    content = read_limited(file)
    if kind_of_record(content) == "plan":
        plan = plan_from_json(content, source=file)
        return _show_plan(plan, None if graph is None else load_target(graph, costs), json, started)
    if graph is not None:
        raise BadInput(f"{file} is no plan; a second file is the graph of a plan")
    return _show_graph(load_target(file, costs), json, started)


def _show_graph(graph: Graph, as_json: bool, started: float) -> int:
    everything = everything_kept(graph)
    verify(everything, graph)
    explanation = explain(everything, graph)
    return print_result(
        render_graph(graph, explanation),
        as_json=as_json,
        status="feasible",
        constant_bytes=graph.constant_bytes,
        planned_peak_bytes=explanation.peak_bytes,
        overhead=explanation.overhead,
        seconds=time.perf_counter() - started,
        ops=len(graph.ops),
        values=len(graph.values),
        explanation=msgspec.to_builtins(explanation),
    )


def _show_plan(plan: Plan, graph: Graph | None, as_json: bool, started: float) -> int:
    if graph is None:
        return print_result(
            render_plan(plan),
            as_json=as_json,
            status="feasible",
            budget_bytes=plan.budget_bytes,
            seconds=time.perf_counter() - started,
            instructions=len(plan.instructions),
        )
    verify(plan, graph)
    explanation = explain(plan, graph)
    return print_result(
        f"{render_plan(plan)}\n\n{render_explanation(explanation)}",
        as_json=as_json,
        status="feasible",
        seconds=time.perf_counter() - started,
        instructions=len(plan.instructions),
        explanation=msgspec.to_builtins(explanation),
        **plan_numbers(graph, plan, explanation),
    )
