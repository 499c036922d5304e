"""``tightfit check --compare-flags``: a table of PyTorch's flags applied to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import StepOptions
from tightfit.cli.output import percent_or_dash, print_result
from tightfit.cli.target import load_model
from tightfit.planners.base import Limits
from tightfit.reporting.text import render_table
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.studies.flags import FlagRow

_NOTE = (
    "predicted on fake tensors; values are freed right after their last read. bitwise: the bits of "
    "plain PyTorch"
)


def compare_flags(model: str, options: StepOptions, limits: Limits, *, as_json: bool) -> int:
    """Print peak and time with each flag for a model, and with tightfit at three budgets."""
    from tightfit.studies.flags import flag_rows, own_blocks_of
    from tightfit.studies.model import ModelSettings, load_example, on_fake_tensors

    with terminal_progress() as progress:
        captured = load_model(model, options, progress=progress)
        example = on_fake_tensors(lambda: load_example(model, ModelSettings(**options.keywords())))
        rows = flag_rows(
            captured,
            own_blocks=own_blocks_of(example.model),
            gradients=options.gradients,
            limits=limits,
            progress=progress,
        )
    return print_result(
        _table(rows),
        as_json=as_json,
        status="feasible",
        constant_bytes=captured.graph.constant_bytes,
        rows=[msgspec.to_builtins(row) for row in rows],
    )


def _table(rows: tuple[FlagRow, ...]) -> str:
    cells = [
        (
            row.way,
            "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            percent_or_dash(row.overhead),
            "-" if row.peak_bytes is None else ("yes" if row.bitwise else "no"),
            _mark(row, rows[0].peak_bytes or 0),
        )
        for row in rows
    ]
    table = render_table(["way", "peak", "extra compute", "bitwise"], [row[:4] for row in cells])
    header, *lines = table.splitlines()
    marked = [line + mark[4] for line, mark in zip(lines, cells, strict=True)]
    return "\n".join([header, *marked, "", _NOTE])


def _mark(row: FlagRow, plain_bytes: int) -> str:
    """Return a remark on a row that a person should not miss."""
    marks = [row.note]
    more = (row.peak_bytes or 0) - plain_bytes
    if row.raises_peak and format_bytes(plain_bytes + more) != format_bytes(plain_bytes):
        marks.append(f"RAISES THE PEAK by {format_bytes(more)}")
    elif row.overhead and more >= 0:
        marks.append("does not lower the peak")
    return "".join(f"  {mark}" for mark in marks if mark)
