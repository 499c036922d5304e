"""The effect of PyTorch's memory flags on one model's step, compared with plans in a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
from torch import nn

from tightfit.capture.captured import Captured
from tightfit.capture.partitioner import Schedule, checkpoint_schedule, min_cut_schedule
from tightfit.errors import BadInput
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import budget_of_ratio
from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Compute, Gradients
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import simulated
from tightfit.planners.registry import plan_with
from tightfit.progress import Progress, shown

_SEGMENTS = 4
_SHARES = (0.75, 0.5, 0.0)
_RATIOS = (0.7, 0.5, 0.4)
_NONE = "nothing"


class FlagRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step with a flag of PyTorch, or with a plan of tightfit."""

    way: str  # what a user writes
    peak_bytes: int | None  # constants included; None: the flag has no effect, `note` says why
    overhead: float | None
    bitwise: bool = True  # whether losses, gradients and buffers have the bits of plain PyTorch
    raises_peak: bool = False  # above the peak of plain PyTorch
    note: str = ""


def flag_rows(
    captured: Captured,
    *,
    own_blocks: Sequence[str],
    gradients: Gradients,
    limits: Limits,
    progress: Progress,
) -> tuple[FlagRow, ...]:
    """Return peak and time of each flag on a captured step, and of tightfit at three budgets.

    `own_blocks`: the modules that ``gradient_checkpointing_enable`` of the model checkpoints; empty
    without such a method.
    """
    graph = captured.graph
    task = Task(graph=graph, budget_bytes=1 << 60, gradients=gradients)
    plain = simulated(task, keep_everything(graph))
    rows = [FlagRow(way=_NONE, peak_bytes=plain.peak_bytes, overhead=0.0)]
    for way, schedule in _schedules(captured, own_blocks):
        if isinstance(schedule, str):
            rows.append(FlagRow(way=way, peak_bytes=None, overhead=None, note=schedule))
            continue
        result = simulated(task, schedule.computes)
        twice = _counted_twice(graph, schedule.computes)
        rows.append(
            FlagRow(
                way=way,
                peak_bytes=result.peak_bytes,
                overhead=result.overhead,
                bitwise="checkpoint" not in way or not twice,
                raises_peak=result.peak_bytes > plain.peak_bytes,
                note=f"{twice} counts each batch twice" if twice and "checkpoint" in way else "",
            )
        )
    return (*rows, *_planned(graph, gradients, limits, progress))


def own_blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Return the modules that ``gradient_checkpointing_enable`` of transformers checkpoints."""
    if not callable(getattr(model, "gradient_checkpointing_enable", None)):
        return ()
    return tuple(
        name
        for name, module in model.named_modules()
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    )


def _schedules(
    captured: Captured, own_blocks: Sequence[str]
) -> Iterator[tuple[str, Schedule | str]]:
    """Yield each flag with its schedule, or with the reason why it has no effect."""
    ops = captured.graph.ops
    of_list = [_in_list(op.module) for op in ops]
    blocks = [block for block in dict.fromkeys(of_list) if block]
    if len(blocks) < 2:
        none = "the model has no list of blocks (ModuleList, Sequential)"
        yield "checkpoint per block", none
        yield f"checkpoint_sequential, {_SEGMENTS}", none
    else:
        yield "checkpoint per block", _checkpoints(captured, of_list)
        size = -(-len(blocks) // _SEGMENTS)
        part = {block: f"segment {n // size}" for n, block in enumerate(blocks)}
        last = f"segment {(len(blocks) - 1) // size}"  # runs without a checkpoint
        segments = ["" if part.get(b, last) == last else part[b] for b in of_list]
        yield f"checkpoint_sequential, {_SEGMENTS}", _checkpoints(captured, segments)
    if own_blocks:
        own = [_within(op.module, own_blocks) for op in ops]
        yield "gradient_checkpointing_enable()", _checkpoints(captured, own)
    for share in _SHARES:
        yield (
            f"activation_memory_budget={share:g}",
            _schedule_or_reason(partial(min_cut_schedule, captured, share)),
        )


def _checkpoints(captured: Captured, blocks: list[str]) -> Schedule | str:
    return _schedule_or_reason(partial(checkpoint_schedule, captured, blocks, "checkpoint"))


def _schedule_or_reason(schedule: Callable[[], Schedule]) -> Schedule | str:
    try:
        return schedule()
    except BadInput as error:
        return str(error)


def _in_list(module: str) -> str:
    """Return the module of a list that contains a module: ``layer1.0`` of ``layer1.0.conv``."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ""


def _within(module: str, blocks: Sequence[str]) -> str:
    return next((b for b in blocks if module == b or module.startswith(f"{b}.")), "")


def _counted_twice(graph: Graph, computes: Sequence[Compute]) -> str:
    """Return a module whose statistics `torch.utils.checkpoint` updates a second time."""
    seen: set[int] = set()
    for compute in computes:
        op = graph.ops[compute.op]
        if compute.op in seen and any(
            graph.values[value].fate == "written_back" for value in op.alternatives[0].writes
        ):
            return op.module or op.target
        seen.add(compute.op)
    return ""


def _planned(
    graph: Graph, gradients: Gradients, limits: Limits, progress: Progress
) -> Iterator[FlagRow]:
    for ratio in _RATIOS:
        budget = budget_of_ratio(graph, ratio, gradients=gradients)
        task = Task(graph=graph, budget_bytes=budget, gradients=gradients)
        way = f"tightfit, {ratio:.0%} of the activations"
        with shown(progress, way):
            outcome = plan_with("anytime", task, limits, progress)
        found = outcome.plan is not None
        yield FlagRow(
            way=way,
            peak_bytes=outcome.peak_bytes if found else None,
            overhead=outcome.overhead if found else None,
            note="" if found else "does not fit; --budget minimum finds the least that does",
        )
