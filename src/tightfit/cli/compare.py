"""``tightfit compare``: several planners at several budgets, side by side."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import Json, OptimizerName, PlanOptions, StepName, is_model
from tightfit.cli.output import check_output, csv_of, percent_or_dash, print_result
from tightfit.cli.target import budgets_named, load_model, load_step
from tightfit.errors import BadInput
from tightfit.files import write_atomically
from tightfit.graph.ir import Exactness, Graph
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.compare import ComparisonRow, compare, planners_named
from tightfit.planners.questions.sweep import Job, sweep
from tightfit.progress import Progress
from tightfit.reporting.pictures.comparison import comparison_picture
from tightfit.reporting.pictures.found import Found, Series
from tightfit.units import format_bytes, unit_of

if TYPE_CHECKING:
    from tightfit.capture.captured import Captured


@Parameter(name="*")
@dataclass(frozen=True)
class OptionsWithoutState(PlanOptions):
    """A step in which no optimizer's state is assumed unless one is named."""

    optimizer: OptimizerName = "none"


_WITHOUT_STATE = OptionsWithoutState()


def compare_planners(
    target: StepName,
    /,
    *,
    budgets: str,
    planners: str = "all",
    alternatives: str | None = None,
    exactness: Exactness | None = None,
    workers: int = Limits().workers,
    solver: Literal["highs", "gurobi"] = "highs",
    results: Path | None = None,
    scheduler: str | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    options: OptionsWithoutState = _WITHOUT_STATE,
    json: Json = False,
) -> int:
    """Run several planners at several budgets and print the plans found and the bounds proved.

    ```sh
    tightfit compare zoo:unet --budgets 0.5,0.3 --planners anytime,greedy
    ```

    Parameters
    ----------
    budgets
        Separated by commas: shares of the activation peak, such as 0.3,0.5, or sizes with a unit.
    planners
        Names separated by commas, or all. For a model also pytorch.min_cut,
        pytorch.activation_memory_budget and pytorch.checkpoint.
    alternatives
        Which alternatives of operators plans may use, for a model, side by side (MONeT, figures 4
        and 6). Several of none, conv, output, intermediate, attention, together, stash, inplace and
        all, separated by commas.
    exactness
        How exact these have to be, for a model: bitwise unless given, rounding or lossy.
    workers
        How many planners run at a time.
    solver
        The solver of integer programs.
    results
        A folder that keeps every row: rows found there are not computed again.
    scheduler
        With --results: run on the Dask cluster at this address, or local:2 for two workers here.
    output
        Write the rows to this file: .csv, .json, or .svg, .png or .pdf for a picture of overhead
        against memory.
    """
    check_output(output, [".csv", ".json"])
    limits = options.limits(workers=workers, solver=solver)
    names, methods = _names(planners, target)
    with terminal_progress() as progress:
        _require_model_for(target, alternatives=alternatives, exactness=exactness)
        if methods or exactness:
            exact = exactness or "bitwise"
            loaded = load_model(target, options, progress=progress, exactness=exact)
        else:
            loaded = load_step(target, options, progress=progress)
        groups = _groups(target, options, alternatives, exactness, progress)
    step = loaded if isinstance(loaded, Graph) else loaded.graph
    gradients = options.gradients
    asked = budgets_named(step, budgets, gradients)
    rows: tuple[ComparisonRow, ...] = ()
    for group, graph in groups.items() or [("", step)]:
        tasks = [Task(graph=graph, budget_bytes=size, gradients=gradients) for size, _ in asked]
        found_rows = _rows(tasks, names, limits, results, scheduler)
        rows += tuple(_of_group(row, group) for row in found_rows)
    order = {size: number for number, (size, _) in enumerate(asked)}
    rows = tuple(sorted(rows, key=lambda row: order[row.budget_bytes]))
    if not isinstance(loaded, Graph):
        tasks = [Task(graph=step, budget_bytes=size, gradients=gradients) for size, _ in asked]
        rows = _with_pytorch(rows, loaded, tasks, methods, limits)
    if output is not None:
        _write(output, step, rows)
    ratios = dict(asked)
    found = any(row.overhead is not None for row in rows)
    return print_result(
        comparison_table(rows, [ratios[row.budget_bytes] for row in rows]),
        as_json=json,
        status="feasible" if found else "infeasible",
        constant_bytes=step.constant_bytes,
        rows=[msgspec.to_builtins(row) for row in rows],
    )


def _names(planners: str, target: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The planners named, and PyTorch's own methods, which only a model has."""
    given = [name.strip() for name in planners.split(",")]
    methods = tuple(name for name in given if name.startswith("pytorch."))
    others = ",".join(name for name in given if name not in methods)
    if not is_model(target):
        if methods:
            raise BadInput(
                f"{', '.join(methods)}: PyTorch's own methods need a model to ask PyTorch about; "
                f"{target} is a file"
            )
        return planners_named(others), ()
    from tightfit.studies.pytorch_methods import PYTORCH_METHODS, refuse_unknown_methods

    refuse_unknown_methods(methods)
    chosen = PYTORCH_METHODS if planners == "all" else methods
    return (planners_named(others) if others else ()), chosen


def _groups(
    target: str,
    options: PlanOptions,
    alternatives: str | None,
    exactness: Exactness | None,
    progress: Progress,
) -> dict[str, Graph]:
    """The step of a model with each of the groups of alternatives that are named."""
    if alternatives is None:
        return {}
    names = dict.fromkeys(name.strip() for name in alternatives.split(","))
    exact = exactness or "bitwise"
    load = partial(load_model, target, options, progress=progress, exactness=exact)
    return {name: load(alternatives=name).graph for name in names}


def _require_model_for(target: str, **given: str | None) -> None:
    """Refuse options that only a model has."""
    for name, value in given.items():
        if value is not None and not is_model(target):
            raise BadInput(f"--{name} can be set for models only; {target} is a file")


def _of_group(row: ComparisonRow, group: str) -> ComparisonRow:
    """Return a row that says which alternatives its plan might use."""
    name = f"{row.planner}, {group}" if group else row.planner
    return msgspec.structs.replace(row, planner=name)


def _rows(
    tasks: Sequence[Task],
    names: Sequence[str],
    limits: Limits,
    results: Path | None,
    scheduler: str | None,
) -> tuple[ComparisonRow, ...]:
    """The rows of all planners at all budgets, from a folder of results where one is given."""
    with terminal_progress() as progress:
        if results is not None:
            alone = msgspec.structs.replace(limits, workers=1)
            jobs = [Job(task=task, planner=name, limits=alone) for task in tasks for name in names]
            return sweep(jobs, results, scheduler=scheduler, progress=progress)
        if scheduler is not None:
            raise BadInput("--scheduler needs --results, the folder for the rows")
        return compare(tasks, names, limits, progress)


def _with_pytorch(
    rows: Sequence[ComparisonRow],
    captured: Captured,
    tasks: Sequence[Task],
    methods: Sequence[str],
    limits: Limits,
) -> tuple[ComparisonRow, ...]:
    """Add the rows of PyTorch's own methods after those of the planners at each budget."""
    from tightfit.studies.pytorch_methods import PyTorchMethods

    pytorch = PyTorchMethods(captured)
    added = [pytorch.row(name, task, limits) for task in tasks for name in methods]
    order = {task.budget_bytes: number for number, task in enumerate(tasks)}
    return tuple(sorted([*rows, *added], key=lambda row: order[row.budget_bytes]))


def _write(output: Path, graph: Graph, rows: Sequence[ComparisonRow]) -> None:
    match output.suffix:
        case ".csv":
            records = [msgspec.structs.asdict(row) for row in rows]
            content = csv_of(records, ComparisonRow.__struct_fields__)
        case ".json":
            records = [msgspec.to_builtins(row) for row in rows]
            content = f"{json_format.dumps(records, indent=1)}\n".encode()
        case suffix:
            content = _picture(graph.name, rows, suffix)
    write_atomically(output, content)


def comparison_table(rows: Sequence[ComparisonRow], ratios: Sequence[float | None]) -> str:
    """Return rows as aligned text, one block per budget.

    `rows`: results of planners. `ratios`: for each row, the budget as a share of the activation
    peak, if it was given so.
    """
    lines: list[str] = []
    budget = None
    width = max((len(row.planner) for row in rows), default=0)
    for row, ratio in zip(rows, ratios, strict=True):
        if row.budget_bytes != budget:
            budget = row.budget_bytes
            share = "" if ratio is None else f" ({ratio:g} of the activation peak)"
            lines += ["", f"budget {format_bytes(row.budget_bytes)}{share}"]
            lines.append(
                f"  {'planner':{width}} {'status':10} {'overhead':>9} {'bound':>9} {'gap':>9} "
                f"{'peak':>11} {'seconds':>8}  note"
            )
        lines.append(
            f"  {row.planner:{width}} {row.status:10} {percent_or_dash(row.overhead):>9} "
            f"{percent_or_dash(row.bound):>9} {percent_or_dash(row.gap):>9} "
            f"{'-' if row.peak_bytes is None else format_bytes(row.peak_bytes):>11} "
            f"{row.seconds:8.2f}  {_short(row.note)}"
        )
    return "\n".join(lines[1:])


def _short(note: str) -> str:
    return note if len(note) <= 70 else note[:67] + "..."


def _picture(name: str, rows: Sequence[ComparisonRow], suffix: str) -> bytes:
    unit, unit_bytes = unit_of(max((row.budget_bytes for row in rows), default=0))
    found: dict[str, list[Found]] = {}
    for row in rows:
        point = Found(row.budget_bytes / unit_bytes, row.overhead, row.bound, row.status)
        found.setdefault(row.planner, []).append(point)
    return comparison_picture(
        [Series(planner, tuple(points)) for planner, points in found.items()],
        title=f"{name}: extra compute by budget",
        budgets=f"budget in {unit}, constants included",
        suffix=suffix,
    )
