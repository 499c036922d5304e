"""A planned step as a timeline in Chrome's trace format, which Perfetto opens.

Slices are computes, on one lane each for the forward pass, the backward pass and recomputation;
counters are the bytes alive and the budget. Lanes never overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tightfit.graph.ir import Graph
from tightfit.graph.names import name_op
from tightfit.plan.plan import Compute, Plan
from tightfit.plan.simulate import Simulation, simulate

_LANES = {"forward": 1, "backward": 2, "computed again": 3}
_PROCESS = 1


def seconds_of_instructions(graph: Graph, plan: Plan) -> list[float]:
    """Return when each instruction of a plan starts, and when the step ends, in seconds."""
    at = 0.0
    starts: list[float] = []
    for step in plan.instructions:
        starts.append(at)
        if isinstance(step, Compute):
            at += step.cost_s(graph)
    return [*starts, at]


def timeline(graph: Graph, plan: Plan, *, height_bytes: int | None = None) -> bytes:
    """Return the content of a trace file (JSON) of a valid plan.

    `height_bytes`: of the layout of the plan, constants included; a counter of its own.
    """
    starts = seconds_of_instructions(graph, plan)
    result = simulate(graph, plan)
    events = [
        _event("M", "process_name", args={"name": f"tightfit: {graph.name or 'a step'}"}),
        *(
            _event("M", "thread_name", tid=lane, args={"name": name})
            for name, lane in _LANES.items()
        ),
        *_slices(graph, plan, starts),
        *_counters(plan, result, starts, height_bytes),
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def _slices(graph: Graph, plan: Plan, starts: list[float]) -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    for index, step in enumerate(plan.instructions):
        if not isinstance(step, Compute):
            continue
        op = graph.ops[step.op]
        lane = "computed again" if op.id in seen else graph.segments[op.segment].phase
        seen.add(op.id)
        yield _event(
            "X",
            op.target,
            tid=_LANES[lane],
            ts=_microseconds(starts[index]),
            dur=_microseconds(starts[index + 1] - starts[index]),
            cat=lane,
            args={
                "op": name_op(op),
                "module": op.module,
                "alternative": step.alternative_in(graph).name,
                "instruction": index,
            },
        )


def _counters(
    plan: Plan, result: Simulation, starts: list[float], height_bytes: int | None
) -> Iterator[dict[str, Any]]:
    """The bytes alive at the worst instant of each instruction and after it, with the limits."""
    limits = {"budget": plan.budget_bytes}
    if height_bytes is not None:
        limits["height"] = height_bytes
    for name, size_bytes in limits.items():
        for seconds in (starts[0], starts[-1]):
            yield _event("C", name, ts=_microseconds(seconds), args={"bytes": size_bytes})
    for index, step in enumerate(plan.instructions):
        if isinstance(step, Compute):
            during, after = result.during_bytes[index], result.after_bytes[index]
            begin, end = (_microseconds(starts[index + k]) for k in range(2))
            yield _event("C", "alive", ts=begin, args={"bytes": during})
            yield _event("C", "alive", ts=end, args={"bytes": after})


def _event(phase: str, name: str, tid: int = 0, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": _PROCESS, "tid": tid, **fields}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
