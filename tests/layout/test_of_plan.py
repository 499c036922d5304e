"""Blocks of plans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.graphs import compute_lists, training_graphs
from tightfit.layout.blocks import largest_load
from tightfit.layout.pack import blocks_of_plan, pack
from tightfit.plan import simulate
from tightfit.plan.assemble import assemble


@given(st.data())
def test_the_largest_load_of_a_plans_blocks_is_its_simulated_peak(data: st.DataObject) -> None:
    graph = data.draw(training_graphs())
    computes = data.draw(compute_lists(graph))
    for gradients in ("fresh", "accumulated"):
        plan = assemble(graph, computes, budget_bytes=0, gradients=gradients)
        blocks = blocks_of_plan(graph, plan)
        peak = simulate(graph, plan).peak_bytes
        assert largest_load(blocks) + graph.constant_bytes == peak
        assert pack(blocks, "portfolio").height_bytes >= largest_load(blocks, 64)
