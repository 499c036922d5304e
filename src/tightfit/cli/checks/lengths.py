"""``tightfit check --lengths``: which batches of a data set would not fit, before training."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import StepOptions
from tightfit.cli.output import percent_or_dash, print_result
from tightfit.cli.target import load_step
from tightfit.errors import BadInput, first_of
from tightfit.files import read_limited
from tightfit.graph.ir import Graph
from tightfit.planners.base import Limits
from tightfit.planners.questions.lengths import LongestFit, longest_fit
from tightfit.planners.questions.request import PlanRequest
from tightfit.reporting.text import render_table
from tightfit.units import format_bytes, parse_bytes

_LINE = re.compile(r"(\d+)(?:[\s,;:]+(\d+))?")
_SHOWN = 8


class Batch(msgspec.Struct, frozen=True):
    """A batch that occurs, by its place from 0 on, its padded length, and how often it does."""

    index: int
    length: int
    count: int


def check_lengths(
    model: str,
    file: Path,
    budget: str | None,
    options: StepOptions,
    limits: Limits,
    *,
    planner: str,
    as_json: bool,
) -> int:
    """Print which batches of the lengths in a file fit, and which do not."""
    if budget is None:
        raise BadInput("--lengths needs --budget, such as 8GiB: the same for every length")
    if options.sequence is not None:
        raise BadInput("--lengths says how long inputs are: leave --sequence out")
    batches = _batches(file, options.batch)
    size = parse_bytes(budget)
    with terminal_progress() as progress:

        def captured(length: int) -> Graph:
            return load_step(model, replace(options, sequence=length), progress=progress)

        found = longest_fit(
            captured,
            [batch.length for batch in batches],
            PlanRequest(size, options.gradients, planner, limits),
            progress,
        )
    too_long = [b for b in batches if found.longest is None or b.length > found.longest]
    return print_result(
        _text(batches, too_long, found, size),
        as_json=as_json,
        status="infeasible" if too_long else "feasible",
        budget_bytes=size,
        minimum_budget_bytes=found.minimum_bytes,
        batches=sum(batch.count for batch in batches),
        longest=found.longest,
        too_long=[msgspec.to_builtins(batch) for batch in too_long],
    )


def _batches(file: Path, size: int | None) -> list[Batch]:
    """Return the batches of a file: samples in their order, or how often each length occurs.

    Raises `BadInput` for a line that is no length; names it.
    """
    rows: list[tuple[int, int | None]] = []
    for number, line in enumerate(read_limited(file).decode("utf-8", "replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None or int(found[1]) == 0:
            raise BadInput(
                f"{file}, line {number}: {text[:60]!r} is no length. Write one number a line, the "
                "length of a sample, or two, a length and how many batches have it"
            )
        rows.append((int(found[1]), None if found[2] is None else int(found[2])))
    if not rows:
        raise BadInput(f"{file} has no lengths: write one number a line")
    counted = Counter(count is not None for _, count in rows)
    if len(counted) == 2:
        raise BadInput(f"{file} has lines of one number and lines of two: write all alike")
    if counted[True]:
        return [Batch(i, length, count or 0) for i, (length, count) in enumerate(rows)]
    lengths = [length for length, _ in rows]
    per = size or 1
    starts = range(0, len(lengths), per)
    return [Batch(i, max(lengths[s : s + per]), 1) for i, s in enumerate(starts)]


def _text(batches: list[Batch], too_long: list[Batch], found: LongestFit, budget: int) -> str:
    total, refused = sum(b.count for b in batches), sum(b.count for b in too_long)
    rows = [
        (
            str(tried.length),
            format_bytes(tried.eager_peak_bytes),
            format_bytes(tried.outcome.peak_bytes) if tried.fits else "does not fit",
            percent_or_dash(tried.outcome.overhead if tried.fits else None),
        )
        for tried in found.tried
    ]
    table = render_table(["length", "plain PyTorch", "planned", "extra compute"], rows)
    verdict = f"{total - refused} of {total} batches fit {format_bytes(budget)}"
    if not too_long:
        return f"{table}\n\n{verdict}"
    named = first_of([f"{batch.index} (length {batch.length})" for batch in too_long], _SHOWN)
    most = f"a budget of {found.minimum_bytes} bytes ({format_bytes(found.minimum_bytes or 0)})"
    verb = "does" if refused == 1 else "do"
    cut = f"cut or split inputs to a length of {found.longest}; " if found.longest else ""
    return (
        f"{table}\n\n{verdict}; {refused} {verb} not, counted from 0: {named}\n"
        f"  try  {cut}put the longest samples into smaller batches; {most} for all of them"
    )
