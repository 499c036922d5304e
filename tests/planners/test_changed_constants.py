"""Ops that write over constants: plans never read what has been changed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.optimum import small_graphs
from support.planning import EVERY_PLANNER
from tightfit.errors import BadInput, InvalidGraph, InvalidPlan, MissingExtra
from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.graph.changes import need_before_changes
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.liveness import eager_peak_bytes, producers
from tightfit.plan.plan import Compute
from tightfit.plan.verify import verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.orders.frees_early import frees_early
from tightfit.planners.orders.least_peak import least_peak
from tightfit.planners.orders.reorder import reorder
from tightfit.planners.outcomes import plan_of
from tightfit.planners.registry import plan_with

BRIEF = Limits(seconds=5.0, iterations=50, workers=1)


@st.composite
def graphs_with_steps(draw: st.DrawFn, max_ops: int = 9) -> Graph:
    """Draw a step whose parameters are stepped, each as soon as nothing needs the old one.

    A pinned backward op makes the gradient, as in captured steps.
    """
    graph = draw(small_graphs(max_ops=max_ops))
    values, ops = list(graph.values), list(graph.ops)
    backward = [op.id for op in ops if op.segment == 1]
    steps: list[Op] = []
    for number in range(draw(st.integers(1, 3))):
        parameter, gradient = len(values), draw(st.sampled_from(backward))
        values.append(Value(id=parameter, name=f"p{number}", size_bytes=2, role="parameter"))
        readers = draw(st.lists(st.integers(0, len(ops) - 1), min_size=1, max_size=3, unique=True))
        for reader in readers:
            op = ops[reader]
            (way,) = op.alternatives
            own = msgspec.structs.replace(way, reads=(*way.reads, parameter))
            pinned = "reads a parameter" if op.segment == 1 else op.pinned
            ops[reader] = msgspec.structs.replace(op, alternatives=(own,), pinned=pinned)
        ops[gradient] = msgspec.structs.replace(ops[gradient], pinned="makes a gradient")
        step = Alternative(
            reads=(parameter, gradient),
            writes=(),
            variants=(Variant(cost_s=1.0, workspace_bytes=draw(st.integers(0, 3))),),
        )
        steps.append(
            Op(
                id=len(graph.ops) + number,
                target="step",
                segment=1,
                alternatives=(step,),
                pinned="writes over a parameter",
                changes=(parameter,),
            )
        )
    constants = {"parameters": 2 * len(steps)}
    last = msgspec.structs.replace(
        graph, values=tuple(values), ops=(*ops, *steps), constants_bytes=constants
    )
    return validate_graph(reorder(last, _earliest(validate_graph(last), len(ops))))


def _earliest(graph: Graph, first: int) -> list[int]:
    """Return an order in which each step comes as early as it may."""
    before, maker = need_before_changes(graph), producers(graph)
    behind: dict[int, list[int]] = {}
    for step in graph.ops[first:]:
        made_by = maker[step.alternatives[0].reads[1]]
        behind.setdefault(max(made_by, *before[step.id]), []).append(step.id)
    return [op for i in range(first) for op in (i, *behind.get(i, ()))]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("planner", sorted(EVERY_PLANNER))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(graph=graphs_with_steps(), share=st.floats(0.0, 1.0))
def test_plans_read_nothing_that_was_changed(planner: str, graph: Graph, share: float) -> None:
    least, _ = working_set_bytes(graph)
    budget = least + round(share * (eager_peak_bytes(graph) - least))
    task = Task(graph=graph, budget_bytes=budget)
    try:
        outcome = plan_with(planner, task, BRIEF)
    except InvalidPlan:
        raise
    except (BadInput, MissingExtra):  # it plans chains only, or is not installed
        return
    if outcome.plan is not None:
        verify(outcome.plan, graph)


@given(graphs_with_steps(12))
def test_other_orders_step_as_late_as_they_must(graph: Graph) -> None:
    task = Task(graph=graph, budget_bytes=10**9)
    for order in (frees_early(graph), least_peak(task, enough_bytes=0, seconds=0.05).ops):
        validate_graph(reorder(graph, order))


def one_step(reader_segment: int = 0, *, late: bool = False, pinned: str | None = None) -> Graph:
    """A parameter that is read, has a gradient, and is stepped, before or after a last reader."""
    values = (
        Value(id=0, name="weight", size_bytes=4, role="parameter"),
        *(Value(id=i, name=f"v{i}", size_bytes=1) for i in (1, 2, 3)),
    )

    def op(number: int, reads: tuple[int, ...], writes: tuple[int, ...], **fields: object) -> Op:
        way = Alternative(reads=reads, writes=writes)
        return Op(id=number, target="test", alternatives=(way,), **fields)  # type: ignore[arg-type]

    step = {"segment": 1, "pinned": "writes", "changes": (0,)}
    ops = [op(0, (0,), (1,)), op(1, (1,), (2,), segment=1, pinned="makes a gradient")]
    reads = (0,) if reader_segment else (1,)
    if late:
        ops += [op(2, (0, 2), (), **step), op(3, reads, (3,), segment=1, pinned=pinned)]
    else:
        ops += [op(2, reads, (3,), segment=1, pinned=pinned), op(3, (0, 2), (), **step)]
    return Graph(
        values=values,
        ops=tuple(ops),
        segments=(Segment(id=0, phase="forward"), Segment(id=1, phase="backward")),
        constants_bytes={"parameters": 4},
    )


@pytest.mark.parametrize("reader_segment", [0, 1])
def test_a_graph_whose_step_comes_too_early_is_refused(reader_segment: int) -> None:
    validate_graph(one_step(reader_segment, pinned="is last"))
    with pytest.raises(InvalidGraph, match="old content"):
        validate_graph(one_step(reader_segment, late=True, pinned="is last"))


def test_a_step_runs_once_and_changes_constants() -> None:
    graph = one_step()
    *others, step = graph.ops
    for wrong in ({"pinned": None}, {"changes": (1,)}, {"changes": (9,)}, {"required": False}):
        ops = (*others, msgspec.structs.replace(step, **wrong))
        with pytest.raises(InvalidGraph):
            validate_graph(msgspec.structs.replace(graph, ops=ops))


def test_the_verifier_sees_that_an_old_content_is_gone() -> None:
    graph = validate_graph(one_step())
    task = Task(graph=graph, budget_bytes=100)
    verify(plan_of(task, [Compute(op) for op in (0, 1, 2, 3)]), graph)
    with pytest.raises(InvalidPlan, match="has changed"):
        verify(plan_of(task, [Compute(op) for op in (0, 1, 3, 0, 2)]), graph)


def test_what_is_changed_is_of_a_graphs_identity() -> None:
    graph = one_step()
    *others, step = graph.ops
    ops = (*others, msgspec.structs.replace(step, changes=()))
    assert fingerprint(graph) != fingerprint(msgspec.structs.replace(graph, ops=ops))
