"""Lower bounds on the bytes and the time of plans."""

from __future__ import annotations

from tightfit.graph.ir import Alternative, Gradients, Graph, OpId
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.simulate import baseline_cost_s

_MUCH = 0.2
"""Of the bytes of a step that do not stay. Measured: two mixtures of experts in a row leave 29 %
to plan; graph convolutions, one of which holds nearly all of the step, 6 %. Graph by graph these
train in 59 % of the memory of plain PyTorch, the former do not: their graphs are others in each
call.
"""


def least_overhead(graph: Graph) -> float:
    """Return the overhead of running each required op once, by the fastest alternatives.

    It is negative where an alternative is faster than the default, or spares an optional op that
    the default reads.
    """
    baseline_s = baseline_cost_s(graph)
    if baseline_s == 0:
        return 0.0
    least_s = sum(
        min(way.least_cost_s for way in op.alternatives if way.use != "again")
        for op in graph.ops
        if op.required
    )
    return least_s / baseline_s - 1.0


def working_set_bytes(graph: Graph, gradients: Gradients = "fresh") -> tuple[int, OpId | None]:
    """Return the bytes that some op needs at least while it runs, constants included, and the op.

    Inputs and results of an op are alive together, with its workspace and the finished gradients
    and returned values made before it. The cheapest way in bytes counts. So does memory of user
    code where a segment is entered; then the op is None. No plan in this order of first
    computations needs less.
    """
    worst, where = graph.constant_bytes, None
    kept = 0
    entered = 0
    for op in graph.ops:
        while entered <= op.segment:
            crossing = graph.constant_bytes + kept + graph.segments[entered].outside_bytes
            worst, where = (crossing, None) if crossing > worst else (worst, where)
            entered += 1
        if not op.required:
            continue
        ways = [a for a in op.alternatives if a.use != "again"]
        needed = min(_way_bytes(graph, way, gradients) for way in ways) + kept
        if graph.constant_bytes + needed > worst:
            worst, where = graph.constant_bytes + needed, op.id
        kept += min(
            graph.bytes_of(v for v in way.writes if graph.values[v].stays_to_end(gradients))
            for way in ways
        )
    return worst, where


def leaves_much_to_plan(graph: Graph) -> bool:
    """Whether the op that needs most still needs much less than a step that keeps everything."""
    gradients = (v for v in graph.values if v.fate == "handed_over")
    stays_bytes = graph.constant_bytes + sum(v.size_bytes for v in gradients)
    most_bytes = eager_peak_bytes(graph)
    least_bytes, _ = working_set_bytes(graph)
    return most_bytes - least_bytes >= _MUCH * (most_bytes - stays_bytes)


def _way_bytes(graph: Graph, way: Alternative, gradients: Gradients) -> int:
    """Bytes of inputs, results and workspace of a way; kept values it reads count elsewhere."""
    elsewhere = {v for v in way.reads if graph.values[v].stays_to_end(gradients)}
    total = graph.bytes_of(
        v for v in {*way.reads, *way.writes} - elsewhere if not graph.values[v].is_constant
    )
    workspace = min(variant.workspace_bytes for variant in way.variants)
    return total + workspace - graph.taken_over_bytes(way)
