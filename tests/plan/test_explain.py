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
    explanation = explain(plan, graph)
    assert explanation.peak_bytes == 4600
    assert explanation.eager_peak_bytes == 4600
    assert explanation.peak_at == "op 6 aten.mm in first"
    assert explanation.recomputed_ops == 2
    assert (explanation.baseline_cost_s, explanation.cost_s) == (7.0, 9.0)
    assert [(h.name, h.size_bytes) for h in explanation.holders[:2]] == [
        ("gradient of second.weight", 1000),
        ("gradient of first.weight", 1000),
    ]
    assert [(p.phase, p.begin_bytes, p.end_bytes) for p in explanation.phases] == [
        ("forward", 2100, 2100 + 400 + 100),
        ("backward", 2100 + 400 + 100 + 100, 2100 + 100 + 1000 + 1000),
    ]
    again = {
        m.module: (m.recomputed_ops, m.recompute_s) for m in explanation.modules if m.recomputed_ops
    }
    assert again == {"first": (1, 1.0), "act": (1, 1.0)}


@given(st.data())
def test_the_parts_add_up(data: st.DataObject) -> None:
    graph = data.draw(training_graphs())
    plan = assemble(graph, data.draw(compute_lists(graph)), budget_bytes=1 << 40)
    explanation = explain(plan, graph)
    result = simulate(graph, plan)
    held = sum(holder.size_bytes for holder in explanation.holders)
    assert held + explanation.working_bytes + graph.constant_bytes == explanation.peak_bytes
    assert sum(module.held_bytes for module in explanation.modules) == held
    assert max(p.peak_bytes for p in explanation.phases) == explanation.peak_bytes
    assert sum(m.recomputed_ops for m in explanation.modules) == explanation.recomputed_ops
    assert explanation.overhead == result.overhead
