"""Values that may be moved, and the time of a step that no op accounts for, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tightfit.plan.plan import Far
from tightfit.planners.solvers import ProgramBuilder

_PIECES = 8  # of the time before the first cut, and after the last
_LONGEST = 1e9  # wait, in the program's unit: no plan is ever as long


@dataclass(frozen=True)
class Movable:
    """The values that may be moved, and the link."""

    far: Far  # far memory
    values: frozenset[int]  # values of the engine that may be away


@dataclass(frozen=True)
class WaitColumns:
    """Waits as columns: by piece of the time before the first cut, between cuts, after the last."""

    # before, after: the op at whose first computation a piece begins, and the column
    before: tuple[tuple[int, int], ...]
    between: tuple[int, ...]  # a column for each window but the last
    after: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MoveColumns:
    """The additional columns of a program with far memory."""

    far: Far  # far memory
    # The value is in far memory only while the cut's op runs, and will be loaded
    away: Mapping[tuple[int, int], int]
    waits: WaitColumns  # the time of the step that no op accounts for


def waits_of(builder: ProgramBuilder, ops: int, cuts: Sequence[int]) -> WaitColumns:
    """Add the columns of waits to a program of so many ops."""

    def column() -> int:
        return builder.real(lower=0.0, upper=_LONGEST, cost=1.0)

    return WaitColumns(
        before=tuple((op, column()) for op in _instants(0, cuts[0])),
        between=tuple(column() for _ in range(len(cuts) - 1)),
        after=tuple((op, column()) for op in _instants(cuts[-1], ops)),
    )


def _instants(first: int, end: int) -> list[int]:
    """The ops at which the pieces of a stretch begin."""
    return sorted({first + (end - first) * k // _PIECES for k in range(_PIECES)})
