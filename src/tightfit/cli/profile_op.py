"""``tightfit profile-op``: the ways to compute an op, measured."""

from __future__ import annotations

from typing import Any

import msgspec

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import DEFAULT_MODEL_OPTIONS, Json, ModelOptions, require_model
from tightfit.cli.output import print_result
from tightfit.units import format_bytes, format_seconds

__all__ = ["profile_op"]


def profile_op(
    model: str,
    op: str,
    /,
    *,
    options: ModelOptions = DEFAULT_MODEL_OPTIONS,
    json: Json = False,
) -> int:
    """Measure every alternative of an op of a model: time against memory (MONeT, figure 7).

    Each runs by itself on this machine and is compared with the default.

    Parameters
    ----------
    model
        zoo:NAME, package.module:factory or path/to/file.py:factory.
    op
        An operator such as aten.convolution_backward, a module such as layer1.0.conv1, or
        OPERATOR:MODULE. Calls that are alike are measured once.
    """
    require_model(model, "its ops have no implementations to measure")
    from tightfit.studies.ops import profile_ops

    with terminal_progress() as progress:
        ways = profile_ops(model, op, progress=progress, **options.keywords())
    rows = [msgspec.to_builtins(way) for way in ways]
    return print_result(_table(ways), as_json=json, status="feasible", ways=rows)


def _table(ways: Any) -> str:
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
