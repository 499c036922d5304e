"""Lower the right-hand sides of rows to values that sums of integers can reach.

The bytes of a step's tensors are mostly multiples of one number, the *grain*, except for some small
tensors. So are their sums. A budget between two multiples is never filled, yet a relaxation fills
it to the last byte, and branching takes long to close that gap (docs/search.md, "What sums can
reach").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tightfit.planners.solvers.program import Floats, LinearProgram

_TOLERANCE = 1e-6
"""Of a grain: the error of a sum in floating point."""

_SMALLEST = 1e-5  # grain, as a share of the limit
_MOST = 6  # grains


def grains(sizes: Iterable[int], limit: int) -> list[int]:
    """Return common divisors of the largest, the two largest, ... of some sizes, falling.

    `sizes`: bytes. `limit`: the bytes that sums of sizes may not exceed; grains that are tiny
    compared with it are left out.
    """
    grain = 0
    found: dict[int, None] = {}
    for size in sorted(set(sizes), reverse=True):
        grain = math.gcd(grain, size)
        if grain > _SMALLEST * limit:
            found[grain] = None
    return list(found)[-_MOST:]


def within_reach(program: LinearProgram, grains: Iterable[float]) -> LinearProgram:
    """Return the program with lower bounds on sums of integers; its solutions stay the same.

    `program`: no column is below 0. Real columns count where an equation in a group defines them
    (see `ProgramBuilder.row`). `grains`: in the unit of the coefficients.
    """
    for grain in grains:
        program = _within_reach(program, grain)
    return program


@dataclass(frozen=True)
class _Sums:
    """Sums that are multiples of a grain and `fixed` and between ``-below`` and `above`."""

    fixed: Floats
    below: Floats
    above: Floats

    def bounded(self, upper: Floats, grain: float) -> Floats:
        """Return the most that sums within these bounds can be."""
        with np.errstate(invalid="ignore"):
            room = upper - self.fixed
            multiple = grain * np.floor((room + self.below) / grain + _TOLERANCE)
            reached = multiple + self.above + _TOLERANCE * grain
        lowered = self.fixed + np.minimum(room, reached)
        return np.where(np.isfinite(lowered), lowered, upper)


def _within_reach(program: LinearProgram, grain: float) -> LinearProgram:
    integers = _integers_by_row(program, grain)
    reals = _reals(program, integers)
    rows = _with_reals(program, integers, reals)
    one_sided = np.isneginf(program.row_lower)
    return replace(
        program,
        row_upper=np.where(one_sided, rows.bounded(program.row_upper, grain), program.row_upper),
        upper=np.where(program.integer == 1, program.upper, reals.bounded(program.upper, grain)),
    )


def _integers_by_row(program: LinearProgram, grain: float) -> _Sums:
    """The sums of the integer columns of each row: the rests of their coefficients."""
    indices, coefficients = program.indices, program.coefficients
    is_fixed = program.lower[indices] == program.upper[indices]
    fixed = np.where(is_fixed, coefficients * program.upper[indices], 0.0)
    rests = (coefficients - grain * np.rint(coefficients / grain)) * program.upper[indices]
    rests[is_fixed | (program.integer[indices] == 0)] = 0.0
    return _Sums(
        fixed=program.by_row(fixed),
        below=program.by_row(np.maximum(-rests, 0.0)),
        above=program.by_row(np.maximum(rests, 0.0)),
    )


def _reals(program: LinearProgram, rows: _Sums) -> _Sums:
    """Sums of real columns; unbounded where no equation defines the sum."""
    known = _Sums(
        fixed=np.zeros(program.columns),
        below=np.full(program.columns, np.inf),
        above=np.full(program.columns, np.inf),
    )
    is_real = _is_real(program).tolist()
    for row in program.definitions().tolist():
        entries = slice(program.starts[row], program.starts[row + 1])
        defined, *others = program.indices[entries].tolist()
        factor, *factors = program.coefficients[entries].tolist()
        fixed = program.row_upper[row] - rows.fixed[row]
        below, above = float(rows.above[row]), float(rows.below[row])
        for column, times in zip(others, factors, strict=True):
            if is_real[column]:
                fixed -= times * known.fixed[column]
                ends = (known.below, known.above) if times < 0 else (known.above, known.below)
                below += float(ends[0][column]) if abs(times) == 1.0 else math.inf
                above += float(ends[1][column]) if abs(times) == 1.0 else math.inf
        if factor == 1.0:
            known.fixed[defined], known.below[defined], known.above[defined] = fixed, below, above
    return known


def _with_reals(program: LinearProgram, rows: _Sums, reals: _Sums) -> _Sums:
    """The sums of each row, the real columns included."""
    entries = np.nonzero(_is_real(program)[program.indices])[0]
    columns, factors = program.indices[entries], program.coefficients[entries]
    known = np.abs(factors) == 1.0
    ends = reals.below[columns], reals.above[columns]
    fixed, below, above = np.zeros((3, len(program.indices)))
    fixed[entries] = factors * reals.fixed[columns]
    below[entries] = np.where(known, np.where(factors > 0, ends[0], ends[1]), np.inf)
    above[entries] = np.where(known, np.where(factors > 0, ends[1], ends[0]), np.inf)
    return _Sums(
        fixed=rows.fixed + program.by_row(fixed),
        below=rows.below + program.by_row(below),
        above=rows.above + program.by_row(above),
    )


def _is_real(program: LinearProgram) -> npt.NDArray[np.bool_]:
    """Whether each column may take values between integers."""
    return (program.integer == 0) & (program.lower < program.upper)
