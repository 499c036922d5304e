"""Every alternative of some ops of a model, measured: time against memory (MONeT, figure 7)."""

from __future__ import annotations

from typing import Any

import msgspec

from tightfit.capture.captured import Captured
from tightfit.costs.measured.call import Measurement, measure_call
from tightfit.errors import BadInput
from tightfit.graph.ir import EXACTNESS, Exactness, Graph, Op
from tightfit.pricing.exactness import without_inexact
from tightfit.pricing.keys import key_of
from tightfit.pricing.records import recorded
from tightfit.progress import SILENT, Progress
from tightfit.studies.dry_step import AllowedAlternatives, captured_step
from tightfit.studies.model import Target

_MOST_SHOWN = 12


class MeasuredAlternative(msgspec.Struct, frozen=True):
    op: int
    target: str  # the operator
    module: str
    alternative: str
    cost_s: float  # median
    workspace_bytes: int
    kept_bytes: int  # inputs of a backward op that the forward computes
    exactness: Exactness  # as declared
    is_kept: bool  # whether it was as exact as declared when it was compared with the default here


def profile_ops(
    target: Target, name: str, *, progress: Progress = SILENT, **model_options: Any
) -> tuple[MeasuredAlternative, ...]:
    """Measure every alternative of the ops of a model that a name selects.

    `target`: a model, as for `check`. `name`: an operator such as ``"aten.convolution_backward"``,
    a module such as ``"layer1.0.conv1"``, or both with a colon between them. Equal calls are
    measured once. An op is followed by those that are replaced together with it, and by those that
    only some of its alternatives read, such as an op that makes a mask. Raises `BadInput` if no op
    has that name.
    """
    step = captured_step(
        target,
        optimizer="none",
        costs="unit",
        alternatives=AllowedAlternatives(EXACTNESS[-1]),
        **model_options,
    )
    chosen = _with_companions(step.graph, _chosen(step, name))
    step = step.keeping(lambda op, alternative, call: op.id in chosen)
    calls = [call for op in chosen for call in step.calls[op]]
    known = recorded(step, calls, Measurement, measure_call, progress)
    sound = without_inexact(step, progress).graph
    found: list[MeasuredAlternative] = []
    for op in (step.graph.ops[number] for number in chosen):
        kept = {alternative.name for alternative in sound.ops[op.id].alternatives}
        for alternative, call in zip(op.alternatives, step.calls[op.id], strict=True):
            record = known[key_of(call)]
            found.append(
                MeasuredAlternative(
                    op=op.id,
                    target=op.target,
                    module=op.module,
                    alternative=alternative.name,
                    cost_s=record.cost_s,
                    workspace_bytes=record.workspace_bytes,
                    kept_bytes=_made_forward_bytes(step.graph, op, alternative.reads),
                    exactness=alternative.exactness,
                    is_kept=alternative.name in kept,
                )
            )
    return tuple(found)


def _chosen(step: Captured, name: str) -> list[int]:
    """Return an op for each distinct call of the ops that a name selects."""
    operator, _, module = name.partition(":")
    seen: dict[str, int] = {}
    for op in step.graph.ops:
        matches = not module and name in (op.target, op.module)
        if matches or (module and (op.target, op.module) == (operator, module)):
            seen.setdefault(key_of(step.calls[op.id][0]), op.id)
    if not seen:
        targets = sorted({op.target for op in step.graph.ops if len(op.alternatives) > 1})
        raise BadInput(
            f"no op is called {name!r}: name an operator or a module; operators with "
            f"alternatives here: {', '.join(targets[:_MOST_SHOWN])}"
        )
    return [*seen.values()]


def _with_companions(graph: Graph, chosen: list[int]) -> list[int]:
    """Return ops, each followed by those that its alternatives need or replace."""
    maker = {
        value: op.id
        for op in graph.ops
        for alternative in op.alternatives[:1]
        for value in alternative.writes
    }
    found: list[int] = []
    for chosen_op in chosen:
        waiting = [chosen_op]
        while waiting:
            number = waiting.pop(0)
            if number in found:
                continue
            found.append(number)
            waiting += _linked(graph, number)
            reads = {
                value
                for alternative in graph.ops[number].alternatives
                for value in alternative.reads
            }
            makers = sorted({maker[value] for value in reads if value in maker})
            waiting += [op for op in makers if not graph.ops[op].required]
    return found


def _linked(graph: Graph, number: int) -> list[int]:
    """Return the ops whose alternatives are chosen together with those of an op."""
    branches = [branch for choice in graph.choices for branch in choice.branches]
    return [op for branch in branches if number in dict(branch) for op, _ in branch]


def _made_forward_bytes(graph: Graph, op: Op, reads: tuple[int, ...]) -> int:
    if graph.segments[op.segment].phase == "forward":
        return 0
    forward = {
        value
        for other in graph.ops
        if graph.segments[other.segment].phase == "forward"
        for alternative in other.alternatives
        for value in alternative.writes
    }
    return sum(graph.values[value].size_bytes for value in forward.intersection(reads))
