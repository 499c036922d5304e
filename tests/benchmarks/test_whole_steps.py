"""What a step takes with nothing recomputed, and the page about whole steps."""

from __future__ import annotations

from benchmarks import alternatives_tables, whole_steps
from benchmarks.rows import read_rows
from benchmarks.transformer_chain import transformer_chain
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.planners.base import Limits


def test_nothing_is_computed_twice_for_the_least_bytes() -> None:
    """All activations cross, for no op has another way: only the order may save bytes."""
    graph = transformer_chain(60)
    least = whole_steps.least_bytes(graph, Limits(seconds=1.0))
    crossing = {v for op in graph.ops if op.segment == 1 for v in op.alternatives[0].reads}
    made = {v for op in graph.ops if op.segment == 0 for v in op.alternatives[0].writes}
    returned = {v.id for v in graph.values if v.fate == "returned"}
    kept = sum(graph.values[v].size_bytes for v in (crossing & made) | returned)
    assert least["crossing_bytes"] == kept
    assert kept <= least["peak_bytes"] <= eager_peak_bytes(graph) - graph.constant_bytes


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    rows = read_rows(alternatives_tables.ROWS)
    assert alternatives_tables.PAGE.read_text() == alternatives_tables.document(rows)
