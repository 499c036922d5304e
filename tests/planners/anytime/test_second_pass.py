"""Steps whose gradients are kept until the norm of all is known, or made again after it."""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import msgspec
import pytest

from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan import verify
from tightfit.plan.plan import Compute
from tightfit.planners.anytime.planner import run_anytime
from tightfit.planners.anytime.search import Search
from tightfit.planners.anytime.second_pass import seed_with_second_pass
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.progress import SILENT

Ids: TypeAlias = tuple[int, ...]
LAYERS, LARGE = 12, 10  # gradients are so many times as large as what is saved


class _Step:
    """A graph under construction; each op costs 1."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []

    def value(self, name: str, size_bytes: int, role: str = "computed") -> int:
        number = len(self.values)
        self.values.append(Value(id=number, name=name, size_bytes=size_bytes, role=role))
        return number

    def op(self, name: str, writes: Ids, *reads: Ids, **more: Any) -> None:
        ways = tuple(
            Alternative(reads=own, writes=writes, variants=(Variant(cost_s=1.0),)) for own in reads
        )
        number = len(self.ops)
        self.ops.append(Op(id=number, target=name, alternatives=ways, **more))


def clipped() -> Graph:
    """A chain of layers whose parameters step once the norm of all gradients is known."""
    step, saved = _Step(), list[int]()
    for layer in range(LAYERS):
        saved.append(step.value(f"saved {layer}", 1))
        step.op("forward", (saved[-1],), tuple(saved[-2:-1]), segment=0)
    norms, first, again = list[int](), dict[int, int](), dict[int, int]()
    for made, is_optional in ((first, False), (again, True)):
        passed: tuple[int, ...] = ()
        for layer in reversed(range(LAYERS)):
            pinned = None if is_optional else "its parameter may have changed"
            more = {"segment": 1, "required": not is_optional, "pinned": pinned}
            tangent = step.value("tangent", 1)
            step.op("tangent", (tangent,), (saved[layer], *passed), **more)
            passed = (tangent,)
            made[layer] = step.value("gradient", LARGE, "gradient")
            step.op("gradient", (made[layer],), (saved[layer], tangent), **more)
            if not is_optional:
                norms.append(step.value("norm", 1))
                step.op("norm", (norms[-1],), (made[layer],), segment=1)
        if not is_optional:
            clip = step.value("clip", 1)
            step.op("clip", (clip,), tuple(norms), segment=1)
    for layer in reversed(range(LAYERS)):
        ways = (first[layer], clip), (again[layer], clip)
        step.op("step", (), *ways, segment=1, pinned="steps", required=True)
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    graph = Graph(values=tuple(step.values), ops=tuple(step.ops), segments=segments)
    return validate_graph(graph)


@pytest.mark.parametrize("kept", [9, 6, 3, 0])
def test_only_gradients_that_there_is_no_room_for_are_made_again(kept: int) -> None:
    graph = clipped()
    task = Task(graph=graph, budget_bytes=2 * LAYERS + kept * LARGE)
    assert task.budget_bytes < eager_peak_bytes(graph)
    limits = Limits(iterations=200, workers=1)
    search = Search(task, build_problem(task), limits, SILENT, time.perf_counter())
    seed_with_second_pass(search)
    assert search.pool.best is not None
    best = run_anytime(task, limits, SILENT).outcome
    assert best.plan is not None
    verify(best.plan, graph)
    assert best.overhead <= search.pool.overhead
    computed = {step.op for step in best.plan.instructions if isinstance(step, Compute)}
    again = [op.id for op in graph.ops if op.target == "gradient" and not op.required]
    assert 0 < len(computed.intersection(again)) <= LAYERS - kept + 1


def test_other_steps_have_no_such_seeds() -> None:
    graph = clipped()
    kept = [
        msgspec.structs.replace(op, alternatives=op.alternatives[:1]) if op.target == "step" else op
        for op in graph.ops
    ]
    task = Task(graph=msgspec.structs.replace(graph, ops=tuple(kept)), budget_bytes=4 * LARGE)
    search = Search(task, build_problem(task), Limits(), SILENT, time.perf_counter())
    seed_with_second_pass(search)
    assert search.pool.best is None and search.pool.plans == []
