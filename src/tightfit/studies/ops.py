"""Every way to compute some ops of a model, measured: time against memory (MONeT, figure 7)."""

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
from tightfit.studies.dry_step import Offered, captured_step
from tightfit.studies.model import Target

_SHOWN = 12  # targets in the message that no op matches


class OpWay(msgspec.Struct, frozen=True):
    """One way to compute an op, measured by itself."""

    # op, target, module, alternative: the op, its operator, its module, its implementation
    op: int
    target: str
    module: str
    alternative: str
    cost_s: float  # median time
    workspace_bytes: int  # needed only while it runs
    # Inputs of a backward op that the forward made: to be kept or made again
    kept_bytes: int
    exactness: Exactness  # how its bits compare with the default's, by its own account
    is_kept: bool  # whether it was that exact when it was compared with the default here


def profile_ops(
    target: Target, name: str, *, progress: Progress = SILENT, **model_options: Any
) -> tuple[OpWay, ...]:
    """Measure every alternative of the ops of a model that a name selects.

    `target`: a model, as for `check`. `name`: an operator such as ``"aten.convolution_backward"``,
    a module such as ``"layer1.0.conv1"``, or both with a colon between them. Calls that are alike
    are measured once. Each op is followed by ops that belong to its alternatives. They are replaced
    together with it, or only some alternatives read them, such as one that makes a mask. Raises
    `BadInput` if no op has that name; says some that there are.
    """
    step = captured_step(
        target, optimizer="none", costs="unit", alternatives=Offered(EXACTNESS[-1]), **model_options
    )
    chosen = _with_companions(step.graph, _chosen(step, name))
    step = step.keeping(lambda op, way, call: op.id in chosen)
    calls = [call for op in chosen for call in step.calls[op]]
    known = recorded(step, calls, Measurement, measure_call, progress)
    sound = without_inexact(step, progress).graph
    found: list[OpWay] = []
    for op in (step.graph.ops[number] for number in chosen):
        kept = {way.name for way in sound.ops[op.id].alternatives}
        for way, call in zip(op.alternatives, step.calls[op.id], strict=True):
            record = known[key_of(call)]
            found.append(
                OpWay(
                    op=op.id,
                    target=op.target,
                    module=op.module,
                    alternative=way.name,
                    cost_s=record.cost_s,
                    workspace_bytes=record.workspace_bytes,
                    kept_bytes=_made_forward_bytes(step.graph, op, way.reads),
                    exactness=way.exactness,
                    is_kept=way.name in kept,
                )
            )
    return tuple(found)


def _chosen(step: Captured, name: str) -> list[int]:
    """Return one op for each distinct call of those that a name selects."""
    operator, _, module = name.partition(":")
    seen: dict[str, int] = {}
    for op in step.graph.ops:
        either = not module and name in (op.target, op.module)
        if either or (module and (op.target, op.module) == (operator, module)):
            seen.setdefault(key_of(step.calls[op.id][0]), op.id)
    if not seen:
        targets = sorted({op.target for op in step.graph.ops if len(op.alternatives) > 1})
        raise BadInput(
            f"no op is called {name!r}: name an operator or a module; operators with "
            f"alternatives here: {', '.join(targets[:_SHOWN])}"
        )
    return [*seen.values()]


def _with_companions(graph: Graph, chosen: list[int]) -> list[int]:
    """Return ops, each followed by those that are computed for, or instead of, some of its ways."""
    maker = {
        value: op.id for op in graph.ops for way in op.alternatives[:1] for value in way.writes
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
            reads = {value for way in graph.ops[number].alternatives for value in way.reads}
            makers = sorted({maker[value] for value in reads if value in maker})
            waiting += [op for op in makers if not graph.ops[op].required]
    return found


def _linked(graph: Graph, number: int) -> list[int]:
    """Return the ops whose ways are chosen together with those of an op."""
    branches = [branch for choice in graph.choices for branch in choice.branches]
    return [op for branch in branches if number in dict(branch) for op, _ in branch]


def _made_forward_bytes(graph: Graph, op: Op, reads: tuple[int, ...]) -> int:
    if graph.segments[op.segment].phase == "forward":
        return 0
    forward = {
        value
        for other in graph.ops
        if graph.segments[other.segment].phase == "forward"
        for way in other.alternatives
        for value in way.writes
    }
    return sum(graph.values[value].size_bytes for value in forward.intersection(reads))
