"""Solve the program, starting from the layout that the default packer finds at once."""

from __future__ import annotations

import math

import numpy as np

from tightfit.layout.blocks import Block
from tightfit.layout.packers.base import PackingLimits, Placement, core_packer
from tightfit.layout.packers.mip.constraints import FAMILIES
from tightfit.layout.packers.mip.variables import Variables
from tightfit.layout.packers.pairs import colliding_pairs, compacted
from tightfit.planners.solvers import SolveOptions, solve
from tightfit.planners.solvers.program import Floats

_TOLERANCE = 1e-6
"""By which a solver's bound may be too high, as a share."""


def pack_by_program(blocks: tuple[Block, ...], limits: PackingLimits) -> Placement:
    """Minimise the height with HiGHS.

    Raises `BadInput` if more pairs of blocks live together than such a program can have.
    """
    start = core_packer("auto")(blocks, limits).offsets
    placed = list(zip(blocks, start, strict=True))
    height = max((offset + block.size_bytes for block, offset in placed), default=0)
    variables = Variables(blocks, colliding_pairs(blocks), height)
    for add_family in FAMILIES:
        add_family(variables)
    solution = solve(
        variables.builder.build(),
        SolveOptions(seconds=limits.seconds, seed=limits.seed),
        start=_columns(variables, start, height),
    )
    if solution.values is None:
        return Placement(start)
    offsets = compacted(blocks, [float(solution.values[column]) for column in variables.offset])
    return Placement(offsets, _proven_bytes(blocks, solution.bound * variables.bytes_per_unit))


def _columns(variables: Variables, offsets: tuple[int, ...], height: int) -> Floats:
    columns = np.zeros(variables.builder.columns)
    columns[variables.peak] = height / variables.bytes_per_unit
    columns[variables.offset] = np.array(offsets) / variables.bytes_per_unit
    for (i, j), column in variables.is_above.items():
        columns[column] = offsets[i] > offsets[j]
    return columns


def _proven_bytes(blocks: tuple[Block, ...], bound_bytes: float) -> int:
    """Return the least height that a bound allows: heights are sums of sizes."""
    unit = math.gcd(*(block.size_bytes for block in blocks))
    if not math.isfinite(bound_bytes):
        return 0
    return math.ceil(bound_bytes * (1.0 - _TOLERANCE) / unit) * unit
