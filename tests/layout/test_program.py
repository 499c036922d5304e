"""The paper's integer program: each family of constraints decides, and it proves the optimum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.blocks import crowded_blocks, lowest_height, perfect_packings, some_blocks
from tightfit.layout.blocks import Block, largest_load
from tightfit.layout.pack import pack
from tightfit.layout.packers.base import PackingLimits
from tightfit.layout.packers.mip.constraints import FAMILIES
from tightfit.layout.packers.mip.variables import Variables
from tightfit.layout.packers.pairs import colliding_pairs
from tightfit.planners.solvers import SolveOptions, solve

AMPLE = PackingLimits(seconds=120.0)
TWISTED = tuple(
    Block(number, *row)
    for number, row in enumerate(
        [
            (5, 6, 2),
            (2, 4, 1),
            (2, 5, 1),
            (0, 3, 2),
            (0, 1, 2),
            (4, 6, 2),
            (3, 5, 1),
            (3, 4, 1),
        ]
    )
)
"""Never more than 4 bytes at a time, and no layout of 4 bytes."""


def optimum(blocks: tuple[Block, ...], *, without: Callable[..., None] | None = None) -> float:
    """The program's optimum in bytes, from scratch; of 100 bytes."""
    variables = Variables(blocks, colliding_pairs(blocks), 100)
    for add_family in FAMILIES:
        if add_family is not without:
            add_family(variables)
    return solve(variables.builder.build(), SolveOptions(seconds=60)).objective


@settings(max_examples=30)
@given(st.one_of(some_blocks(6, sizes=range(1, 9)), crowded_blocks(6)))
def test_from_scratch_it_finds_the_least_height(blocks: tuple[Block, ...]) -> None:
    if blocks:
        assert optimum(blocks) == pytest.approx(lowest_height(blocks), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_each_family_decides(family: Callable[..., None]) -> None:
    assert largest_load(TWISTED) == 4
    assert optimum(TWISTED) == pytest.approx(5, abs=1e-4)
    assert optimum(TWISTED, without=family) == pytest.approx(4, abs=1e-4)


@settings(max_examples=40)
@given(st.one_of(crowded_blocks(30), perfect_packings(30), some_blocks(30, ticks=30)))
def test_it_proves_the_optimum_of_the_default_packer(blocks: tuple[Block, ...]) -> None:
    program = pack(blocks, "mip", AMPLE, alignment_bytes=1)
    default = pack(blocks, limits=AMPLE, alignment_bytes=1)
    assert program.is_proven_optimal and default.is_proven_optimal
    assert program.height_bytes == default.height_bytes
