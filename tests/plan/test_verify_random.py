"""Random plans pass the verifier, mutated ones are judged and never crash it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from support.graphs import compute_lists, training_graphs
from tightfit.errors import InvalidPlan
from tightfit.graph import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan import Plan, assemble, keep_everything, simulate, verify
from tightfit.plan.verify import verified_peaks

LARGE = 1 << 40


@st.composite
def graphs_with_plans(draw: st.DrawFn) -> tuple[Graph, Plan]:
    graph = draw(training_graphs())
    plan = assemble(
        graph,
        draw(compute_lists(graph)),
        budget_bytes=LARGE,
        gradients=draw(st.sampled_from(["fresh", "accumulated"])),
        group_bytes=draw(st.sampled_from([1, 10])),
    )
    return graph, plan


@given(graphs_with_plans())
def test_a_valid_plan_passes_and_both_accounts_agree(case: tuple[Graph, Plan]) -> None:
    graph, plan = case
    peak = simulate(graph, plan).peak_bytes
    assert verified_peaks(plan, graph)[0] == peak
    verify(msgspec.structs.replace(plan, budget_bytes=peak), graph)


@given(training_graphs(), st.sampled_from(["fresh", "accumulated"]))
def test_the_eager_peak_is_that_of_the_plan_that_keeps_everything(
    graph: Graph, gradients: str
) -> None:
    plan = assemble(graph, keep_everything(graph), budget_bytes=LARGE, gradients=gradients)
    verify(plan, graph)
    assert eager_peak_bytes(graph, gradients=gradients) == simulate(graph, plan).peak_bytes


@st.composite
def mutations(draw: st.DrawFn, plan: Plan) -> Plan:
    steps = list(plan.instructions)
    position = draw(st.integers(0, len(steps) - 1))
    kind = draw(st.sampled_from(["drop", "duplicate", "swap", "change"]))
    if kind == "drop":
        del steps[position]
    elif kind == "duplicate":
        steps.insert(draw(st.integers(0, len(steps))), steps[position])
    elif kind == "swap":
        other = draw(st.integers(0, len(steps) - 1))
        steps[position], steps[other] = steps[other], steps[position]
    else:
        field = draw(st.sampled_from(type(steps[position]).__struct_fields__))
        number = draw(st.integers(-1, 40))
        changed = (number,) if field == "values" else number
        steps[position] = msgspec.structs.replace(steps[position], **{field: changed})
    return msgspec.structs.replace(plan, instructions=tuple(steps))


@given(graphs_with_plans(), st.data())
def test_a_mutated_plan_is_refused_or_still_accounted_right(
    case: tuple[Graph, Plan], data: st.DataObject
) -> None:
    graph, plan = case
    mutated = data.draw(mutations(plan))
    try:
        peak, _ = verified_peaks(mutated, graph)
    except InvalidPlan:
        return
    assert peak == simulate(graph, mutated).peak_bytes
