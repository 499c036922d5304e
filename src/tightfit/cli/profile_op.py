"""``tightfit profile-op``: the ways to compute an op, measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import DEFAULT_MODEL_OPTIONS, Json, ModelOptions, require_model
from tightfit.cli.output import check_output, print_result
from tightfit.files import write_atomically
from tightfit.reporting.pictures.ways import MeasuredWay, WaysOfOp, ways_picture
from tightfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tightfit.studies.op_profile import MeasuredAlternative


def profile_op(
    model: str,
    op: str,
    /,
    *,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    options: ModelOptions = DEFAULT_MODEL_OPTIONS,
    json: Json = False,
) -> int:
    """Measure every way to compute an op of a model: time against memory (MONeT, figure 7).

    Each runs by itself on this machine and is compared with the default.

    ```sh
    tightfit profile-op zoo:vgg16 aten.convolution_backward
    tightfit profile-op zoo:resnet50 layer1.0.conv1 -o ways.svg
    ```

    Parameters
    ----------
    model
        zoo:NAME, package.module:factory or path/to/file.py:factory.
    op
        An operator such as aten.convolution_backward, a module such as layer1.0.conv1, or
        OPERATOR:MODULE. Calls that are alike are measured once.
    output
        Write a picture of time against workspace to this file: .svg, .png or .pdf.
    """
    check_output(output, ())
    require_model(model, "its ops have no implementations to measure")
    from tightfit.studies.op_profile import profile_ops

    with terminal_progress() as progress:
        ways = profile_ops(model, op, progress=progress, **options.keywords())
    if output is not None:
        title = f"{op} in {model}"
        write_atomically(output, ways_picture(_drawn(ways), title=title, suffix=output.suffix))
    rows = [msgspec.to_builtins(way) for way in ways]
    return print_result(_table(ways), as_json=json, status="feasible", ways=rows)


def _drawn(ways: Sequence[MeasuredAlternative]) -> list[WaysOfOp]:
    """The ways of each op that may be used."""
    drawn: list[WaysOfOp] = []
    for _, group in groupby(ways, key=lambda way: way.op):
        own = tuple(group)
        title = f"{own[0].target} in {own[0].module or 'no module'}"
        used = [way for way in own if way.is_kept]
        measured = (MeasuredWay(w.alternative, w.cost_s, w.workspace_bytes) for w in used)
        drawn.append(WaysOfOp(title, tuple(measured)))
    return drawn


def _table(ways: Sequence[MeasuredAlternative]) -> str:
    width = max(len(way.alternative) for way in ways)
    lines: list[str] = []
    last = -1
    for way in ways:
        if way.op != last:
            last = way.op
            lines += ["", f"op {way.op} {way.target} in {way.module or 'no module'}"]
            lines.append(
                f"  {'alternative':{width}} {'time':>10} {'workspace':>12} {'of forward':>12}  "
                "exactness"
            )
        broken = "" if way.is_kept else ", but it is not: never used"
        lines.append(
            f"  {way.alternative:{width}} {format_seconds(way.cost_s):>10} "
            f"{format_bytes(way.workspace_bytes):>12} {format_bytes(way.kept_bytes):>12}  "
            f"{way.exactness}{broken}"
        )
    return "\n".join(lines[1:])
