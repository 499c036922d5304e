"""Turn an ordered list of computes into a complete plan.

Frees, hand-overs and segment crossings follow from the computes, however these were chosen. Each
instance of a value is freed right after its last reader before its op is computed again. No other
placement of frees holds fewer bytes at any instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph, ValueId
from tightfit.graph.liveness import computed_ops, eager_peak_bytes
from tightfit.plan.plan import (
    Compute,
    Enter,
    Far,
    Free,
    Gradients,
    HandOver,
    Instruction,
    Load,
    Plan,
    Store,
)

Step: TypeAlias = Compute | Store | Load | Free
"""Choices of a method: computes, moves, and where a stored value leaves near memory."""

GROUP_BYTES = 1 << 20
"""Of fresh gradients that are handed over together, unless something else is asked for."""


def keep_everything(graph: Graph) -> list[Compute]:
    """Return the computes of a step that recomputes nothing and uses default alternatives."""
    return [Compute(op.id, 0, op.alternatives[0].cheapest) for op in computed_ops(graph)]


def everything_kept(graph: Graph, gradients: Gradients = "fresh") -> Plan:
    """Return the plan of plain PyTorch: nothing is recomputed, within the bytes that it takes."""
    budget_bytes = eager_peak_bytes(graph, gradients=gradients)
    return assemble(graph, keep_everything(graph), budget_bytes=budget_bytes, gradients=gradients)


def assemble(
    graph: Graph,
    steps: Sequence[Step],
    *,
    budget_bytes: int,
    gradients: Gradients = "fresh",
    group_bytes: int = GROUP_BYTES,
    far: Far | None = None,
) -> Plan:
    """Return the plan that takes `steps` in order and frees as early as it can.

    A crossing into the next segment follows the last first-time compute of the segment before and
    values that leave near memory then; recomputations after it belong to the new segment. Finished
    gradients are handed over in groups of about `group_bytes` (fresh gradients; accumulated ones
    one by one, at once). A stored value leaves near memory at the `Free` among the steps, else
    after its last reader.

    `steps`: first-time computations in a valid order, recomputations wherever they are needed,
    moves. `gradients`: ``"fresh"`` or ``"accumulated"``. `group_bytes`: size of a group of fresh
    gradients that is handed over together. `far`: the far memory of stores and loads.
    """
    crossings = _crossings(graph, steps)
    frees = _last_uses(graph, steps, crossings)
    group_limit = group_bytes if gradients == "fresh" else 1
    instructions: list[Instruction] = []
    waiting: list[ValueId] = []
    waiting_bytes = 0
    for index, step in enumerate(steps):
        instructions.extend(Enter(segment) for segment in crossings.get(index, ()))
        if not isinstance(step, Free):
            instructions.append(step)
        finished = [v for v in frees[index] if graph.values[v].fate == "handed_over"]
        instructions.extend(Free(value) for value in frees[index] if value not in finished)
        waiting.extend(finished)
        waiting_bytes += graph.bytes_of(finished)
        if waiting_bytes >= group_limit:
            instructions.append(HandOver(tuple(waiting)))
            waiting, waiting_bytes = [], 0
    instructions.extend(Enter(segment) for segment in crossings.get(len(steps), ()))
    if waiting:
        instructions.append(HandOver(tuple(waiting)))
    return Plan(
        graph=fingerprint(graph),
        budget_bytes=budget_bytes,
        gradients=gradients,
        instructions=tuple(instructions),
        far=far,
    )


def steps_of(graph: Graph, plan: Plan) -> list[Step]:
    """Return the steps that `assemble` makes a plan of again."""
    loaded: set[ValueId] = set()  # values of which a load comes next, walking backwards
    steps: list[Step] = []
    for step in reversed(plan.instructions):
        if isinstance(step, Free) and step.value in loaded:
            steps.append(step)
        if isinstance(step, Compute | Store | Load):
            _, made, _ = _uses(graph, step)
            loaded.difference_update(made)
            steps.append(step)
        if isinstance(step, Load):
            loaded.add(step.value)
    return steps[::-1]


def handing_over_in_groups(graph: Graph, plan: Plan, group_bytes: int) -> Plan:
    """Return a plan with the same steps that hands over fresh gradients in groups of that size.

    With groups of one byte each gradient is handed over as soon as it is done. Code that sends
    gradients to other processes during backward needs them so, in the order in which they are made.
    """
    return assemble(
        graph,
        steps_of(graph, plan),
        budget_bytes=plan.budget_bytes,
        gradients=plan.gradients,
        group_bytes=group_bytes,
        far=plan.far,
    )


def _crossings(graph: Graph, steps: Sequence[Step]) -> dict[int, list[int]]:
    """Position in `steps` before which each segment is entered."""
    last_first = [-1] * len(graph.segments)
    seen: set[int] = set()
    for index, step in enumerate(steps):
        if isinstance(step, Compute) and step.op not in seen:
            seen.add(step.op)
            segment = graph.ops[step.op].segment
            last_first[segment] = index
    crossings: dict[int, list[int]] = {0: [0]}
    end = -1
    for segment in range(1, len(graph.segments)):
        end = max(end, last_first[segment - 1])
        crossings.setdefault(_after_leaving(steps, end + 1), []).append(segment)
    return crossings


def _after_leaving(steps: Sequence[Step], begin: int) -> int:
    """The place behind the values that leave near memory at a place."""
    place = begin
    while place < len(steps) and isinstance(steps[place], Store | Free):
        place += 1
    while place > begin and isinstance(steps[place - 1], Store):
        place -= 1
    return place


def _last_uses(
    graph: Graph, steps: Sequence[Step], crossings: dict[int, list[int]]
) -> list[list[ValueId]]:
    """For each step, the values whose current instance is used there for the last time.

    A value the caller keeps is never listed. A value that is written back is kept to the end of its
    segment by construction and not listed either. A handed-over value is listed where its last
    computation ends.
    """
    frees: list[list[ValueId]] = [[] for _ in steps]
    pending: set[ValueId] = set()  # values whose later instance is read, walking backwards
    final: set[ValueId] = set()
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        reads, writes, overwrites = _uses(graph, step)
        for value in writes:
            if value not in pending:
                _list_once(graph, frees[index], final, value)
            pending.discard(value)
        if isinstance(step, Free):
            pending.discard(step.value)  # it ends an instance in any case
        for value in reads:
            if graph.values[value].is_constant or value in pending:
                continue
            pending.add(value)
            if value != overwrites:
                _list_once(graph, frees[index], final, value)
    _free_unread_tangents(graph, frees, pending, crossings)
    return frees


def _uses(graph: Graph, step: Step) -> tuple[Sequence[ValueId], Sequence[ValueId], ValueId | None]:
    """The values a step reads, makes, and replaces."""
    match step:
        case Compute():
            way = step.alternative_in(graph)
            return way.reads, way.writes, way.overwrites
        case Load(value):
            return (), (value,), None
        case Store(value) | Free(value):
            return (value,), (), None


def _list_once(graph: Graph, frees: list[ValueId], final: set[ValueId], value: ValueId) -> None:
    fate = graph.values[value].fate
    if fate == "none" or (fate == "handed_over" and value not in final):
        frees.append(value)
        final.add(value)


def _free_unread_tangents(
    graph: Graph, frees: list[list[ValueId]], pending: set[ValueId], crossings: dict[int, list[int]]
) -> None:
    """Free unread tangents right after the first compute of their segment."""
    position = {segment: index for index, group in crossings.items() for segment in group}
    for value in graph.values:
        if value.role == "tangent" and value.id not in pending and value.segment is not None:
            index = position[value.segment]
            if index < len(frees):
                frees[index].append(value.id)
