"""An explanation's numbers, checked by hand on two layers and against their sums on any plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.graphs import compute_lists, training_graphs, two_layers
from tightfit.plan import Compute, assemble, keep_everything, simulate
from tightfit.plan.explain import explain


def test_two_layers_with_the_relu_computed_twice() -> None:
    graph = two_layers()
    computes = keep_everything(graph)
    plan = assemble(
        graph, [*computes[:5], Compute(0), Compute(1), *computes[5:]], budget_bytes=5000
    )
    told = explain(plan, graph)
    assert told.peak_bytes == 4600
    assert told.eager_peak_bytes == 4600
    assert told.peak_at == "op 6 aten.mm in first"
    assert told.recomputed_ops == 2
    assert (told.baseline_cost_s, told.cost_s) == (7.0, 9.0)
    assert [(h.name, h.size_bytes) for h in told.holders[:2]] == [
        ("gradient of second.weight", 1000),
        ("gradient of first.weight", 1000),
    ]
    assert [(p.phase, p.begin_bytes, p.end_bytes) for p in told.phases] == [
        ("forward", 2100, 2100 + 400 + 100),
        ("backward", 2100 + 400 + 100 + 100, 2100 + 100 + 1000 + 1000),
    ]
    again = {m.module: (m.recomputed_ops, m.recompute_s) for m in told.modules if m.recomputed_ops}
    assert again == {"first": (1, 1.0), "act": (1, 1.0)}


@given(st.data())
def test_the_parts_add_up(data: st.DataObject) -> None:
    graph = data.draw(training_graphs())
    plan = assemble(graph, data.draw(compute_lists(graph)), budget_bytes=1 << 40)
    told = explain(plan, graph)
    result = simulate(graph, plan)
    held = sum(holder.size_bytes for holder in told.holders)
    assert held + told.working_bytes + graph.constant_bytes == told.peak_bytes
    assert sum(module.held_bytes for module in told.modules) == held
    assert max(p.peak_bytes for p in told.phases) == told.peak_bytes
    assert sum(m.recomputed_ops for m in told.modules) == told.recomputed_ops
    assert told.overhead == result.overhead
