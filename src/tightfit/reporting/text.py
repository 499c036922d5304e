"""Plans, graphs and outcomes as plain text, repeated layers grouped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tightfit.graph.ir import Graph
from tightfit.plan.explain import Explanation, ModuleShare
from tightfit.plan.plan import Compute, Free, HandOver, Load, Outcome, Plan, Store
from tightfit.reporting.groups import holder_rows, share_rows
from tightfit.units import format_bytes, format_percent, format_seconds

_ROWS = 12


def render_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1
) -> str:
    """Return an aligned table: the first `text_columns` to the left, the others to the right."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def render_outcome(outcome: Outcome, graph: Graph) -> str:
    """Return the result of a planner in a few lines."""
    if outcome.plan is None:
        found = "proven that none exists" if outcome.status == "infeasible" else "none found"
        note = f", {outcome.note}" if outcome.note else ""
        return f"{found}{note} ({format_seconds(outcome.seconds)})"
    bound = f"proven lower bound {format_percent(outcome.bound)} ({outcome.bound_source})"
    lines = [
        f"{graph.name or 'the step'}: {outcome.status} in {format_seconds(outcome.seconds)}",
        f"  budget    {format_bytes(outcome.plan.budget_bytes)}",
        f"  peak      {format_bytes(outcome.peak_bytes)}, "
        f"of which constants {format_bytes(graph.constant_bytes)}",
        f"  overhead  {format_percent(outcome.overhead)}, {bound}",
    ]
    return "\n".join([*lines, f"  note      {outcome.note}"] if outcome.note else lines)


def render_plan(plan: Plan) -> str:
    """Return the facts of a plan, without its graph."""
    kinds = Counter(map(type, plan.instructions))
    handed = sum(len(step.values) for step in plan.instructions if isinstance(step, HandOver))
    first = len({step.op for step in plan.computes})
    stores, loads = kinds[Store], kinds[Load]
    moves = [f"  moves      {stores} values to far memory, {loads} back"] if stores else []
    return "\n".join(
        [
            f"plan for graph {plan.graph}, format {plan.format}",
            f"  budget     {format_bytes(plan.budget_bytes)}, gradients {plan.gradients}",
            f"  computes   {first} ops, {kinds[Compute] - first} times again",
            f"  frees      {kinds[Free]} values, hands over {handed} gradients",
            *moves,
        ]
    )


def render_graph(graph: Graph, everything: Explanation) -> str:
    phases = Counter(graph.segments[op.segment].phase for op in graph.ops)
    alternatives = sum(len(op.alternatives) > 1 for op in graph.ops)
    pinned = sum(op.pinned is not None for op in graph.ops)
    constants = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in graph.constants_bytes.items())
    device = graph.device.name or graph.device.kind
    lines = [
        f"{graph.name or 'graph'} on {device}, costs {graph.cost_source or 'not named'}",
        f"  ops        {phases['forward']} forward, {phases['backward']} backward; "
        f"{alternatives} with alternatives, {pinned} pinned",
        f"  values     {len(graph.values)}",
        f"  constants  {format_bytes(graph.constant_bytes)}"
        + (f": {constants}" if constants else ""),
        f"  peak       {format_bytes(everything.peak_bytes)} with nothing recomputed, "
        f"of which activations {format_bytes(everything.peak_bytes - graph.constant_bytes)}",
        f"  time       {format_seconds(everything.baseline_cost_s)} a step",
    ]
    return "\n".join([*lines, "", *_holders(everything)])


def render_explanation(explanation: Explanation) -> str:
    """Return the memory, savings and cost of a plan, with at most a dozen rows per table."""
    e = explanation
    lines = [
        f"budget    {format_bytes(e.budget_bytes)}",
        f"peak      {format_bytes(e.peak_bytes)} at {e.peak_at}",
        f"          {format_bytes(e.eager_peak_bytes)} with nothing recomputed; "
        f"constants {format_bytes(e.constant_bytes)}",
        f"overhead  {format_percent(e.overhead)}: {e.recomputed_ops} recomputations, "
        f"{format_seconds(e.baseline_cost_s)} -> {format_seconds(e.cost_s + e.stall_s)}",
    ]
    if e.moved_bytes:
        lines.append(
            f"moves     {format_bytes(e.moved_bytes)} to far memory and back; "
            f"{format_seconds(e.stall_s)} of waiting"
        )
    if e.alternatives:
        used = ", ".join(f"{name} x {count}" for name, count in e.alternatives)
        lines.append(f"uses      {used}")
    several = any(phase.program for phase in e.phases)
    phases = [
        (
            f"{p.phase} {p.program}" if several else p.phase,
            *map(format_bytes, (p.begin_bytes, p.peak_bytes, p.end_bytes)),
        )
        for p in e.phases
    ]
    lines += ["", render_table(["phase", "begin", "peak", "end"], phases)]
    tables = [*_holders(e), "", *_module_table(e.modules)]
    lines += ["", *tables]
    if any("*" in table for table in tables):
        lines += ["", "* are the numbers of layers that are alike"]
    return "\n".join(lines)


def _holders(explanation: Explanation) -> list[str]:
    rows = holder_rows(explanation.holders)
    shown = [(r.module, r.name, str(r.count), format_bytes(r.size_bytes)) for r in rows[:_ROWS]]
    if len(rows) > _ROWS:
        rest = sum(row.size_bytes for row in rows[_ROWS:])
        shown.append(("others", "", str(len(rows) - _ROWS), format_bytes(rest)))
    if explanation.working_bytes:
        shown.append(("workspace, user code", "", "", format_bytes(explanation.working_bytes)))
    return [
        f"held at the peak ({explanation.peak_at})",
        render_table(["module", "value", "count", "bytes"], shown, text_columns=2),
    ]


def _module_table(modules: Sequence[ModuleShare]) -> list[str]:
    rows = share_rows(modules)
    if not rows:
        return ["nothing is saved or recomputed"]
    title = "saved at the peak against keeping everything, and recomputation for it"
    shown: list[tuple[str, ...]] = []
    for row in rows[:_ROWS]:
        again = str(row.recomputed_ops), format_seconds(row.recompute_s)
        shown.append((row.module, str(row.count), format_bytes(row.saved_bytes), *again))
    table = render_table(["module", "count", "saved", "again", "seconds"], shown)
    if len(rows) > _ROWS:
        table += f"\nand {len(rows) - _ROWS} more"
    return [title, table]
