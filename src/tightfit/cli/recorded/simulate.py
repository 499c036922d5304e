"""``tightfit simulate``: replay a recorded program in a budget, as an online runtime would."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import Json
from tightfit.cli.output import csv_of, print_result
from tightfit.errors import BadInput
from tightfit.eviction.figures import ComparisonPoint, sweep
from tightfit.eviction.log.resolve import Log, load_log
from tightfit.eviction.policies.registry import DEFAULT, policy_named
from tightfit.eviction.replayed import Deallocation, Placement, Replayed, Rules
from tightfit.eviction.simulator import Simulator
from tightfit.files import write_atomically
from tightfit.planners.base import Limits
from tightfit.planners.questions.clairvoyant import CLAIRVOYANT, clairvoyant, slowdown_of
from tightfit.progress import shown
from tightfit.reporting.pictures.page import require_pictures
from tightfit.reporting.pictures.policies import PolicyCurve, policies_picture
from tightfit.units import format_bytes, format_percent, parse_bytes

_RATIOS = tuple(n / 20 for n in range(2, 21))
_COLUMNS = (
    "figure",
    "line",
    "ratio",
    "budget_bytes",
    "status",
    "slowdown",
    "evictions",
    "rematerialisations",
    "accesses",
    "max_memory_bytes",
)


def simulate(
    log: Path,
    /,
    *,
    policy: str = DEFAULT,
    ratio: float | None = None,
    budget: str | None = None,
    dealloc: Deallocation = "eager",
    placement: Placement = "bytes",
    thrash: float = 2.0,
    seed: int = 0,
    time_limit: float = 30.0,
    sweep: Annotated[bool, Parameter(negative="")] = False,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    json: Json = False,
) -> int:
    """Replay an instruction log in a budget: count evictions and recomputations of a runtime.

    ```sh
    tightfit simulate step.log.gz --ratio 0.4
    tightfit simulate step.log.gz --sweep -o sweep
    ```

    Parameters
    ----------
    log
        A log of one training step, plain or gzip.
    policy
        The eviction policy: improved, improved_ancestors, improved_exact, h_dtr, h_dtr_eq,
        h_dtr_local, lru, size, msps, random, h_e_star, or one of the ablation such as
        cost=around,size. Or clairvoyant: the default planner's plan of the same program, the least
        to be hoped for.
    ratio
        The budget as a share of the peak with nothing evicted, such as 0.4.
    budget
        The budget as a size with a unit.
    dealloc
        The action when the program frees a tensor.
    placement
        The aim of an eviction: bytes, or a hole in an arena of the budget's size.
    thrash
        Give up when the time computed exceeds the program's own by this factor.
    seed
        Of the random policy.
    time_limit
        Seconds for the clairvoyant plan.
    sweep
        Compare policies, deallocations and the ablation from 0.1 to 1.0 of the peak.
    output
        The folder for a sweep: sweep.csv and a picture per figure of the DTR paper.
    """
    simulator = Simulator(load_log(log))
    if sweep:
        return _sweep(simulator, output, name=log.name, seed=seed, as_json=json)
    if output is not None:
        raise BadInput("--output is the folder of a --sweep")
    budget_bytes = _budget(simulator, ratio, budget)
    if policy == CLAIRVOYANT:
        return _clairvoyant(simulator.log, budget_bytes, time_limit, as_json=json)
    chosen = policy_named(policy)
    started = time.process_time()
    rules = Rules(dealloc, placement, _factor(thrash))
    found = simulator.simulate(chosen, budget_bytes, rules, seed=seed)
    numbers = _numbers(simulator.log, found, time.process_time() - started)
    return print_result(
        _text(numbers, found),
        as_json=json,
        policy=policy,
        dealloc=dealloc,
        placement=placement,
        **numbers,
    )


def _budget(simulator: Simulator, ratio: float | None, budget: str | None) -> int:
    if (ratio is None) == (budget is None):
        raise BadInput("give either --ratio, such as 0.5, or --budget, such as 2GiB")
    if budget is not None:
        return parse_bytes(budget)
    assert ratio is not None
    if not 0 < ratio < 1e6:
        raise BadInput(f"--ratio {ratio:g} must be positive: a share of the peak, such as 0.5")
    return simulator.budget_at(ratio)


def _factor(thrash: float) -> float:
    if not 1 <= thrash < 1e6:
        raise BadInput(f"--thrash {thrash:g} must be 1 or more: times the program's own cost")
    return thrash


def _log_numbers(log: Log) -> dict[str, Any]:
    return {
        "constant_bytes": log.constant_bytes,
        "base_peak_bytes": log.base_peak_bytes,
        "bottleneck_bytes": log.bottleneck_bytes,
        "base_cost_ns": log.base_cost_ns,
        "instructions": log.instructions,
    }


def _numbers(log: Log, found: Replayed, seconds: float) -> dict[str, Any]:
    return {
        **_log_numbers(log),
        "status": found.status,
        "slowdown": _slowdown(log, found),
        "budget_bytes": found.budget_bytes,
        "max_memory_bytes": found.max_memory_bytes,
        "total_cost_ns": found.total_cost_ns,
        "evictions": found.evictions,
        "evictions_pressure": found.evictions_pressure,
        "evictions_eager": found.evictions_eager,
        "rematerialisations": found.rematerialisations,
        "evaluations": found.evaluations,
        "accesses": found.accesses,
        "max_depth": found.max_depth,
        "seconds": seconds,
    }


def _slowdown(log: Log, found: Replayed) -> float | None:
    return found.total_cost_ns / log.base_cost_ns if found.status == "ok" else None


def _text(numbers: dict[str, Any], found: Replayed) -> str:
    budget = format_bytes(found.budget_bytes)
    share = format_percent(found.budget_bytes / (numbers["base_peak_bytes"] or 1))
    given = f"{budget}, {share} of the peak with nothing evicted"
    if found.status == "oom":
        return (
            f"out of memory at {given}: nothing is left to evict; one operator alone has "
            f"{format_bytes(numbers['bottleneck_bytes'])} around it, constants take "
            f"{format_bytes(numbers['constant_bytes'])}; try a larger budget"
        )
    if found.status == "thrash":
        return f"thrashing at {given}: recomputation passes the limit; try a larger budget"
    return (
        f"it fits {given}: {numbers['slowdown']:.3f} times the cost, at most "
        f"{format_bytes(found.max_memory_bytes)} resident, {found.evictions_pressure} evictions "
        f"for want of memory and {found.evictions_eager} of unused storages, "
        f"{found.rematerialisations} operators run again"
    )


def _clairvoyant(log: Log, budget_bytes: int, seconds: float, *, as_json: bool) -> int:
    with terminal_progress() as progress:
        outcome = clairvoyant(log, budget_bytes, Limits(seconds=seconds), progress)
    slowdown = None if outcome.plan is None else slowdown_of(log, outcome.overhead)
    least = slowdown_of(log, outcome.bound)
    proven = f"; proven: none below {least:.3f}" if least < float("inf") else ""
    return print_result(
        f"no plan at {format_bytes(budget_bytes)}: {outcome.note or outcome.status}"
        if slowdown is None
        else f"a plan fits {format_bytes(budget_bytes)}: {slowdown:.3f} times the cost{proven}",
        as_json=as_json,
        policy=CLAIRVOYANT,
        status="oom" if slowdown is None else "ok",
        slowdown=slowdown,
        budget_bytes=budget_bytes,
        max_memory_bytes=None if slowdown is None else outcome.peak_bytes,
        bound=outcome.bound,
        seconds=outcome.seconds,
        **_log_numbers(log),
    )


def _sweep(
    simulator: Simulator, folder: Path | None, *, name: str, seed: int, as_json: bool
) -> int:
    if folder is None or not folder.is_dir():
        raise BadInput("a --sweep writes several files: give an existing folder with -o")
    require_pictures()
    started = time.process_time()
    with terminal_progress() as progress, shown(progress, "simulating", 0):
        found = list(sweep(simulator, _RATIOS, seed=seed))
    log = simulator.log
    rows = [_row(log, point) for point in found]
    write_atomically(folder / "sweep.csv", csv_of(rows, _COLUMNS))
    for comparison, points in groupby(found, key=lambda point: point.comparison):
        picture = policies_picture(
            _curves(log, list(points)),
            title=f"{name}: {comparison.title}",
            measure=comparison.measure,
            constants_ratio=log.constant_bytes / log.base_peak_bytes,
            bottleneck_ratio=log.bottleneck_bytes / log.base_peak_bytes,
        )
        write_atomically(folder / f"figure{comparison.figure}.svg", picture)
    return print_result(
        f"wrote {len(rows)} rows to {folder / 'sweep.csv'}, and the figures next to it",
        as_json=as_json,
        status="ok",
        seconds=time.process_time() - started,
        rows=rows,
    )


def _row(log: Log, point: ComparisonPoint) -> dict[str, Any]:
    named = {"figure": point.comparison.figure, "line": point.line, "ratio": point.ratio}
    numbers = {**named, **_numbers(log, point.found, 0.0)}
    return {column: numbers[column] for column in _COLUMNS}


def _curves(log: Log, points: Sequence[ComparisonPoint]) -> list[PolicyCurve]:
    curves: list[PolicyCurve] = []
    for line, group in groupby(points, key=lambda point: point.line):
        members = list(group)
        values = [
            (None if p.found.status != "ok" else float(p.found.accesses))
            if p.comparison.measure == "accesses"
            else _slowdown(log, p.found)
            for p in members
        ]
        curves.append(PolicyCurve(line, tuple(p.ratio for p in members), tuple(values)))
    return curves
