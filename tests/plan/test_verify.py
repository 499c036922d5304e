"""Each rule of a plan, broken once: the verifier names it, the instruction and the numbers."""

from __future__ import annotations

import msgspec
import pytest

from support.graphs import two_layers
from tightfit.errors import InvalidPlan, PlanMismatch
from tightfit.graph import Alternative, Choice, Graph, Op, Value, validate_graph
from tightfit.plan import (
    Compute,
    Enter,
    Free,
    HandOver,
    Instruction,
    Plan,
    assemble,
    keep_everything,
    verify,
)

GRAPH = two_layers()
PEAK = 2100 + 100 + 1000 + 400 + 1000  # while the gradient of first.weight is made


def plan_of(graph: Graph, *, budget_bytes: int = 10_000) -> Plan:
    return assemble(graph, keep_everything(graph), budget_bytes=budget_bytes, group_bytes=1)


def changed(graph: Graph, **fields: object) -> Graph:
    return validate_graph(msgspec.structs.replace(graph, **fields))


def with_op(graph: Graph, op: int, **fields: object) -> Graph:
    ops = list(graph.ops)
    ops[op] = msgspec.structs.replace(ops[op], **fields)
    return changed(graph, ops=tuple(ops))


def with_value(graph: Graph, value: int, **fields: object) -> Graph:
    values = list(graph.values)
    values[value] = msgspec.structs.replace(values[value], **fields)
    return changed(graph, values=tuple(values))


def refusal(plan: Plan, graph: Graph = GRAPH) -> str:
    with pytest.raises(InvalidPlan) as caught:
        verify(plan, graph)
    return str(caught.value)


def edited(plan: Plan, instructions: list[Instruction]) -> Plan:
    return msgspec.structs.replace(plan, instructions=tuple(instructions))


def inserted(plan: Plan, position: int, *instructions: Instruction) -> Plan:
    steps = list(plan.instructions)
    return edited(plan, [*steps[:position], *instructions, *steps[position:]])


def without(plan: Plan, instruction: Instruction) -> Plan:
    return edited(plan, [step for step in plan.instructions if step != instruction])


PLAN = plan_of(GRAPH)


def test_the_peak_is_allowed_and_one_byte_less_is_refused_with_its_holders() -> None:
    verify(plan_of(GRAPH, budget_bytes=PEAK), GRAPH)
    message = refusal(plan_of(GRAPH, budget_bytes=PEAK - 1))
    assert f"needs {PEAK} bytes" in message
    assert "1 more than its budget" in message
    assert "op 6 aten.mm in first" in message
    assert "second 1.07 KiB" in message


def test_a_plan_for_another_graph_names_both() -> None:
    other = with_op(GRAPH, 1, target="aten.gelu")
    with pytest.raises(PlanMismatch, match=f"made for the graph {PLAN.graph}, but 'two layers'"):
        verify(PLAN, other)


def test_an_unknown_format_is_refused() -> None:
    assert "format 7" in refusal(msgspec.structs.replace(PLAN, format=7))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (without(PLAN, Enter(0)), "begins by entering segment 0"),
        (edited(PLAN, []), "must be entered"),
        (inserted(PLAN, 1, Enter(0)), "entered once each in order"),
        (inserted(PLAN, 1, Enter(1)), "belongs into segment 0, but the plan is in segment 1"),
        (inserted(PLAN, 1, Compute(99)), "the graph has 7 ops"),
        (inserted(PLAN, 1, Compute(0, 3)), "the op has 1 alternatives"),
        (inserted(PLAN, 1, Compute(0, 0, 3)), "the alternative has 1 variants"),
        (inserted(PLAN, 1, Free(-1)), "the graph has 11 values"),
        (inserted(PLAN, 1, Compute(1)), "reads value 3 ('first' of first), not computed yet"),
        (inserted(PLAN, 3, Free(3)), "it is not alive: gone since instruction 3"),
        (inserted(PLAN, 1, Free(1)), "a parameter is resident the whole step"),
        (inserted(PLAN, 5, Free(5)), "value that is returned is never freed"),
        (inserted(PLAN, len(PLAN.instructions), Free(7)), "is handed_over is never freed"),
        (inserted(PLAN, len(PLAN.instructions), HandOver((7,))), "handed over at instruction"),
        (inserted(PLAN, 1, HandOver((7,))), "is not computed yet"),
        (inserted(PLAN, 1, HandOver((3,))), "has the fate 'none'"),
        (inserted(PLAN, 1, HandOver(())), "hands over nothing"),
        (without(PLAN, HandOver((7,))), "never hands over the gradient value 7"),
        (without(PLAN, Compute(2)), "never computes op 2 aten.mm in second"),
        (inserted(PLAN, 8, Compute(3)), "computes the gradient value 7"),
    ],
)
def test_a_broken_rule_is_named(plan: Plan, message: str) -> None:
    assert message in refusal(plan)


def test_what_may_be_computed_again() -> None:
    again = [Compute(0), Compute(0), Compute(1), Compute(2), *keep_everything(GRAPH)[3:]]
    verify(assemble(GRAPH, again, budget_bytes=10_000), GRAPH)
    pinned = with_op(GRAPH, 0, pinned="draws random numbers")
    message = refusal(assemble(pinned, again, budget_bytes=10_000), pinned)
    assert "may not be computed again: draws random numbers" in message
    first_only = Alternative(reads=(0, 1), writes=(3,), use="first")
    graph = with_op(GRAPH, 0, alternatives=(first_only,))
    assert "serves only the first" in refusal(assemble(graph, again, budget_bytes=10_000), graph)
    again_only = Alternative(reads=(0, 1), writes=(3,), use="again", name="replay")
    graph = with_op(GRAPH, 0, alternatives=(*GRAPH.ops[0].alternatives, again_only))
    verify(assemble(graph, [Compute(0), Compute(0, 1), *again[2:]], budget_bytes=10_000), graph)
    wrong = assemble(graph, [Compute(0, 1), *again[2:]], budget_bytes=10_000)
    assert "'replay' serves only later computations" in refusal(wrong, graph)


def test_an_op_is_computed_again_only_in_its_own_program() -> None:
    backward = msgspec.structs.replace(GRAPH.segments[1], program=1)
    graph = changed(GRAPH, segments=(GRAPH.segments[0], backward))
    computes = keep_everything(graph)
    plan = assemble(graph, [*computes[:3], Compute(0), *computes[3:]], budget_bytes=10_000)
    assert "op of program 0 cannot be computed again in segment 1 of program 1" in refusal(
        plan, graph
    )


def test_an_op_in_place_takes_over_a_living_value_that_nobody_keeps() -> None:
    in_place = Alternative(reads=(3,), writes=(4,), overwrites=3, name="in place")
    graph = with_op(GRAPH, 1, alternatives=(*GRAPH.ops[1].alternatives, in_place))
    computes = keep_everything(graph)
    computes[1] = Compute(1, 1)
    plan = assemble(graph, computes, budget_bytes=10_000)
    verify(plan, graph)
    assert "gone since instruction 2" in refusal(inserted(plan, 3, Free(3)), graph)
    twice = inserted(plan_of(graph), 4, Compute(0), Compute(1, 1))
    assert "in place while an earlier instance is alive" in refusal(twice, graph)


def buffer_graph() -> Graph:
    """Two layers whose first op also makes the new content of a buffer it reads."""
    count = len(GRAPH.values)
    buffer = Value(id=count, name="mean", size_bytes=10, role="buffer")
    fresh = Value(id=count + 1, name="new mean", size_bytes=10, fate="written_back", replaces=count)
    graph = msgspec.structs.replace(
        GRAPH,
        values=(*GRAPH.values, buffer, fresh),
        constants_bytes={**GRAPH.constants_bytes, "buffers": 10},
    )
    training = Alternative(reads=(0, 1, count), writes=(3, count + 1))
    silent = Alternative(reads=(0, 1), writes=(3,), name="silent")
    return with_op(graph, 0, alternatives=(training, silent))


def test_a_written_back_value_must_be_there_and_replaces_for_good() -> None:
    graph = buffer_graph()
    computes = keep_everything(graph)
    verify(assemble(graph, computes, budget_bytes=10_000), graph)
    missing = assemble(graph, [Compute(0, 1), *computes[1:]], budget_bytes=10_000)
    assert "the new content of value 11, is not computed yet" in refusal(missing, graph)
    again = assemble(graph, [*computes[:3], Compute(0), *computes[3:]], budget_bytes=10_000)
    assert "content was replaced when segment 0 ended" in refusal(again, graph)
    other = assemble(graph, [*computes[:3], Compute(0, 1), *computes[3:]], budget_bytes=10_000)
    verify(other, graph)


def test_a_choice_is_taken_as_a_whole() -> None:
    relu = GRAPH.ops[1].alternatives[0]
    backward: Op = GRAPH.ops[5]
    graph = with_op(GRAPH, 1, alternatives=(relu, relu))
    graph = with_op(graph, 5, alternatives=(backward.alternatives[0],) * 2)
    graph = changed(graph, choices=(Choice(branches=(((1, 0), (5, 0)), ((1, 1), (5, 1)))),))
    computes = keep_everything(graph)
    verify(assemble(graph, computes, budget_bytes=10_000), graph)
    computes[1] = Compute(1, 1)
    message = refusal(assemble(graph, computes, budget_bytes=10_000), graph)
    assert "takes 0 of its 2 branches" in message
    assert "op 1 aten.relu in act alternative 1, op 5" in message


def test_accumulated_gradients_are_gone_after_their_hand_over() -> None:
    peak = 2100 + 400 + 100 + 100 + 1000  # while the gradient of second.weight is made
    plan = msgspec.structs.replace(PLAN, gradients="accumulated", budget_bytes=peak)
    verify(plan, GRAPH)
    assert f"needs {peak} bytes" in refusal(msgspec.structs.replace(plan, budget_bytes=peak - 1))
