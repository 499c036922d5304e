"""Bounds on sums of integers are lowered to what the sums can reach, and no solution is lost."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.planners.solvers import LinearProgram, ProgramBuilder, grains, within_reach

UNIT = 37.5  # of the program, per byte: nothing is integral in it

sizes = st.sampled_from((5, 15, 85, 90, 100, 110, 200))
limits = st.builds(
    lambda hundreds, rest: 100 * hundreds + rest, st.integers(0, 6), st.integers(-6, 6)
)
signed = st.builds(lambda size, sign: size * sign, sizes, st.sampled_from((1, 1, -1)))


@st.composite
def programs(draw: st.DrawFn) -> LinearProgram:
    """Binaries, some of them fixed; running sums of them; limits on both."""
    builder = ProgramBuilder()
    for _ in range(draw(st.integers(2, 6))):
        builder.binary(lower=float(draw(st.integers(0, 5)) == 0))
    binaries = range(builder.columns)
    room = draw(limits) * UNIT
    held: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        column = builder.real(lower=0.0, upper=room)
        change = [(c, -draw(signed) * UNIT) for c in draw(st.sets(st.sampled_from(binaries)))]
        side = draw(sizes) * UNIT
        before = [(held[-1], -1.0)] if held else []
        row = [(column, 1.0), *before, *change]
        builder.row(row, lower=side, upper=side, group=0)
        held.append(column)
    for _ in range(draw(st.integers(1, 3))):
        terms = [(c, draw(signed) * UNIT) for c in draw(st.sets(st.sampled_from(binaries)))]
        if held and draw(st.booleans()):
            terms.append(
                (draw(st.sampled_from(held)), draw(st.sampled_from((1.0, -1.0, 1.0, 0.5))))
            )
        builder.row(terms, upper=draw(limits) * UNIT, group=0)
    return builder.build()


def solutions(program: LinearProgram) -> set[tuple[float, ...]]:
    """All choices of the binaries that the program allows."""
    found = set()
    binaries = np.nonzero(program.integer)[0]
    for choice in itertools.product((0.0, 1.0), repeat=len(binaries)):
        values = np.zeros(program.columns)
        values[binaries] = choice
        for row in program.definitions():
            column = program.indices[program.starts[row]]
            values[column] = program.row_upper[row] - program.activities(values)[row]
        activities = program.activities(values)
        slack = 1e-7
        if (
            (activities <= program.row_upper + slack).all()
            and (values <= program.upper + slack).all()
            and (values >= program.lower - slack).all()
        ):
            found.add(choice)
    return found


@settings(max_examples=300)
@given(programs(), st.lists(st.sampled_from((2, 50, 97, 100)), min_size=1, max_size=2))
def test_no_solution_is_lost_or_gained(program: LinearProgram, grains: list[int]):
    lowered = within_reach(program, [grain * UNIT for grain in grains])
    assert (lowered.row_upper <= program.row_upper + 1e-9).all()
    assert (lowered.upper <= program.upper + 1e-9).all()
    assert solutions(lowered) == solutions(program)


def test_a_budget_between_two_multiples_is_lowered_to_the_first():
    builder = ProgramBuilder()
    large = [builder.binary() for _ in range(3)]
    small, always = builder.binary(), builder.binary(lower=1.0)
    held = builder.real(lower=0.0, upper=272.0)
    builder.row([*((c, 100.0) for c in large), (small, 2.0), (always, 31.0)], upper=298.0)
    running = [(held, 1.0), *((c, -100.0) for c in large), (small, -2.0)]
    builder.row(running, lower=7.0, upper=7.0, group=0)
    lowered = within_reach(builder.build(), [100.0])
    assert lowered.row_upper[0] == np.float64(233.0) + 1e-4
    assert lowered.upper[held] == np.float64(209.0) + 1e-4


def test_rests_of_running_sums_add_up_with_their_signs():
    builder = ProgramBuilder()
    first, second, third = (builder.binary() for _ in range(3))
    held = builder.real(lower=0.0, upper=1000.0)
    builder.row([(held, 1.0), (first, -110.0)], lower=0.0, upper=0.0, group=0)
    following = builder.real(lower=0.0, upper=150.0)
    row = [(following, 1.0), (held, -1.0), (second, -110.0)]
    builder.row(row, lower=0.0, upper=0.0, group=0)
    for upper in (150.0, 190.0):
        builder.row([(following, -1.0), (third, 300.0)], upper=upper, group=0)
    lowered = within_reach(builder.build(), [100.0])
    assert lowered.upper[following] == 120.0 + 1e-4
    assert lowered.row_upper.tolist() == [0.0, 0.0, 100.0 + 1e-4, 190.0]


def test_grains_are_what_the_largest_sizes_share():
    assert grains([600, 600, 400, 30, 7], 1000) == [600, 200, 10, 1]
    assert grains([600, 400, 30, 7], 10_000_000) == [600, 200]
    assert grains([], 1000) == []
