"""Blocks of plans and of recorded histories."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.graphs import compute_lists, training_graphs
from tightfit.errors import BadInput
from tightfit.layout.blocks import Block, largest_load
from tightfit.layout.history import blocks_of_history
from tightfit.layout.of_plan import blocks_of_plan
from tightfit.layout.pack import pack
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


def event(action: str, addr: int, size: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0}


def test_a_history_has_a_block_for_each_allocation() -> None:
    history = [
        event("segment_alloc", 512, 2048),
        event("alloc", 512, 100),
        event("alloc", 1024, 300),
        event("free_requested", 512, 100),
        event("free_completed", 512, 100),
        event("alloc", 512, 7),
        event("free_completed", 1024, 300),
        event("free_completed", 9999, 5),  # older than the history
    ]
    assert blocks_of_history(history) == (
        Block(0, 1, 3, 100),
        Block(1, 2, 5, 300),
        Block(2, 4, 6, 7),
    )
    with pytest.raises(BadInput, match="max_entries"):
        blocks_of_history([event("alloc", 512, 1), event("alloc", 512, 1)])
