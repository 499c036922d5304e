"""What a step needs at least, whatever is computed again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.graphs import compute_lists, training_graphs
from tightfit.graph import Graph
from tightfit.plan import assemble, simulate
from tightfit.planners.bounds import working_set_bytes


@given(training_graphs(max_layers=4), st.integers(0, 2000), st.data())
@settings(max_examples=100)
def test_no_schedule_holds_less(graph: Graph, outside: int, data: st.DataObject) -> None:
    graph = graph.with_outside(outside)
    least, op = working_set_bytes(graph)
    schedule = data.draw(compute_lists(graph))
    assert simulate(graph, assemble(graph, schedule, budget_bytes=1 << 40)).peak_bytes >= least
    if op is None:  # user code decides
        assert least >= graph.constant_bytes + outside
