"""``tightfit snapshot``: a plan as a file that viewers of memory and time open."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tightfit.cli.options import GraphOfPlan, Json, OtherCosts, PlanFile
from tightfit.cli.output import print_result
from tightfit.cli.target import load_target
from tightfit.errors import BadInput
from tightfit.files import write_atomically
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import producers
from tightfit.graph.names import holder_module, name_op
from tightfit.layout.blocks import Packed
from tightfit.layout.pack import pack_plan
from tightfit.plan.io import load_plan
from tightfit.plan.lives import Life, lives_of
from tightfit.plan.plan import Plan
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.reporting.snapshot import PlacedBlock
from tightfit.reporting.snapshot import snapshot as snapshot_file
from tightfit.reporting.timeline import seconds_of_instructions, timeline
from tightfit.units import format_bytes

_SNAPSHOT, _TIMELINE = ".pickle", ".json"
_CONSTANTS = {
    "parameters": "parameter",
    "gradients": "gradient",
    "optimizer_state": "optimizer_state",
}


def snapshot(
    plan: PlanFile,
    graph: GraphOfPlan,
    /,
    *,
    output: Annotated[Path, Parameter(alias="-o")],
    costs: OtherCosts = None,
    json: Json = False,
) -> int:
    """Write a plan, laid out, as a memory snapshot or a timeline.

    ```sh
    tightfit snapshot plan.json graph.json -o plan.pickle
    ```

    Parameters
    ----------
    output
        FILE.pickle: a memory snapshot for https://docs.pytorch.org/memory_viz; FILE.json: a
        timeline for https://ui.perfetto.dev.
    """
    started = time.perf_counter()
    if output.suffix not in (_SNAPSHOT, _TIMELINE):
        raise BadInput(
            f"--output {str(output)!r} must end in {_SNAPSHOT} (a memory snapshot) or {_TIMELINE} "
            "(a timeline)"
        )
    step = load_target(graph, costs)
    loaded = load_plan(plan)
    verify(loaded, step)
    packed = pack_plan(step, loaded)
    height_bytes = step.constant_bytes + packed.height_bytes
    if output.suffix == _SNAPSHOT:
        content = _snapshot(step, loaded, packed)
    else:
        content = timeline(step, loaded, height_bytes=height_bytes)
    write_atomically(output, content)
    peak_bytes = simulate(step, loaded).peak_bytes
    return print_result(
        f"{output}: {len(packed.layout.offsets)} blocks, peak {format_bytes(peak_bytes)}, height "
        f"{format_bytes(height_bytes)} with constants",
        as_json=json,
        status="feasible",
        budget_bytes=loaded.budget_bytes,
        constant_bytes=step.constant_bytes,
        planned_peak_bytes=peak_bytes,
        height_bytes=height_bytes,
        blocks=len(packed.layout.offsets),
        seconds=time.perf_counter() - started,
    )


def _snapshot(graph: Graph, plan: Plan, packed: Packed) -> bytes:
    """Name every block for people, and put it where the layout has it."""
    made_by = producers(graph)
    placed = [
        PlacedBlock(
            lower=life.lower,
            upper=life.upper,
            offset=offset,
            size_bytes=life.size_bytes,
            category=_category(graph, life),
            names=_names(graph, made_by, life),
        )
        for life, offset in zip(lives_of(graph, plan), packed.layout.offsets, strict=True)
    ]
    starts = seconds_of_instructions(graph, plan)
    return snapshot_file(
        placed,
        _constants(graph),
        height_bytes=packed.height_bytes,
        seconds_at=[seconds for start in starts for seconds in (start, start)],
    )


def _constants(graph: Graph) -> list[PlacedBlock]:
    placed: list[PlacedBlock] = []
    offset = 0
    for kind, size_bytes in graph.constants_bytes.items():
        if size_bytes:
            category = _CONSTANTS.get(kind, "input")
            names = ((kind.replace("_", " "), "constants", 0),)
            placed.append(PlacedBlock(0, 0, offset, size_bytes, category, names))
            offset += size_bytes
    return placed


def _category(graph: Graph, life: Life) -> str:
    """Return its name in PyTorch's memory profiler."""
    if life.content != "value" or life.value is None:
        return "temporary"
    value = graph.values[life.value]
    return "gradient" if value.role in ("gradient", "tangent") else "activation"


def _names(graph: Graph, made_by: dict[int, int], life: Life) -> tuple[tuple[str, str, int], ...]:
    """Return the value, the op that makes it and its module, as a call stack."""
    maker = life.op if life.value is None else made_by.get(life.value)
    op = None if maker is None else graph.ops[maker]
    made = () if op is None else ((name_op(op), op.module, op.id),)
    if life.value is not None:
        module = holder_module(graph, made_by, life.value)
        return ((graph.values[life.value].name, module, life.value), *made)
    if op is None:
        return (("held by user code", "between the parts of the plan", 0),)
    return ((life.content, op.module, op.id), *made)
