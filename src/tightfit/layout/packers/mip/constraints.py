"""The constraint families of the program, one function each, by the paper's equations."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.layout.packers.mip.variables import MEMORY_UNITS, Variables


def under_the_peak(variables: Variables) -> None:
    """x_i + w_i <= u for every block (equation 2)."""
    for position, offset in enumerate(variables.offset):
        variables.builder.row(
            [(offset, 1.0), (variables.peak, -1.0)], upper=-variables.size(position)
        )


def below_or_not(variables: Variables) -> None:
    """x_i + w_i <= x_j + z_ij W for every pair that lives together (equation 3)."""
    for (i, j), is_above in variables.is_above.items():
        terms = [(variables.offset[i], 1.0), (variables.offset[j], -1.0), (is_above, -MEMORY_UNITS)]
        variables.builder.row(terms, upper=-variables.size(i))


def above_or_not(variables: Variables) -> None:
    """x_j + w_j <= x_i + (1 - z_ij) W for every pair that lives together (equation 4)."""
    for (i, j), is_above in variables.is_above.items():
        terms = [(variables.offset[j], 1.0), (variables.offset[i], -1.0), (is_above, MEMORY_UNITS)]
        variables.builder.row(terms, upper=MEMORY_UNITS - variables.size(j))


FAMILIES: tuple[Callable[[Variables], None], ...] = (under_the_peak, below_or_not, above_or_not)
"""All constraint families; equations 5 and 6 are bounds of columns."""
