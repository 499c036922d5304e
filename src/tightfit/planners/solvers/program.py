"""A mixed-integer linear program as plain arrays, the options of a solver, and its solution."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int32]
Terms: TypeAlias = list[tuple[int, float]]
"""Columns with their coefficients."""

Message = TypeVar("Message")


@dataclass(frozen=True)
class LinearProgram:
    """Minimise ``costs @ x`` with ``row_lower <= A x <= row_upper``, ``lower <= x <= upper``."""

    # costs, lower, upper: (columns,): objective and bounds
    costs: Floats
    lower: Floats
    upper: Floats
    integer: Integers  # (columns,): 1 where x must be integral
    # row_lower, row_upper: (rows,): row bounds
    row_lower: Floats
    row_upper: Floats
    starts: Integers  # (rows + 1,): where each row's entries begin in `indices` and `coefficients`
    # indices, coefficients: (entries,): columns and coefficients of A, row by row
    indices: Integers
    coefficients: Floats
    # (rows,): the group of rows each belongs to, for row generation; -1: it is always needed
    groups: Integers

    @property
    def columns(self) -> int:
        """The number of variables."""
        return len(self.costs)

    @property
    def rows(self) -> int:
        """The number of constraints."""
        return len(self.row_lower)

    def activities(self, values: Floats) -> Floats:
        """Return ``A x``, shape (rows,)."""
        return self.by_row(self.coefficients * values[self.indices])

    def by_row(self, entries: Floats) -> Floats:
        """Return the sums of numbers given for every entry, shape (rows,)."""
        rows = np.repeat(np.arange(self.rows), np.diff(self.starts))
        return np.bincount(rows, weights=entries, minlength=self.rows).astype(np.float64)

    def definitions(self) -> Integers:
        """Return the rows that define their first column: equations in groups, in order."""
        is_one = (self.row_lower == self.row_upper) & (self.groups >= 0)
        return np.nonzero(is_one)[0].astype(np.int32)

    def only(self, groups: Collection[int]) -> LinearProgram:
        """Return the program with the rows of these groups and the rows that are always needed."""
        kept = np.isin(self.groups, [-1, *groups])
        lengths = np.diff(self.starts)
        entries = np.repeat(kept, lengths)
        starts = np.concatenate([[0], np.cumsum(lengths[kept])]).astype(np.int32)
        return replace(
            self,
            row_lower=self.row_lower[kept],
            row_upper=self.row_upper[kept],
            starts=starts,
            indices=self.indices[entries],
            coefficients=self.coefficients[entries],
            groups=self.groups[kept],
        )


class ProgramBuilder:
    """Collects columns and rows of a program."""

    def __init__(self) -> None:
        self._costs = array("d")
        self._lower = array("d")
        self._upper = array("d")
        self._integer = array("i")
        self._row_lower = array("d")
        self._row_upper = array("d")
        self._starts = array("i", [0])
        self._indices = array("i")
        self._coefficients = array("d")
        self._groups = array("i")

    @property
    def columns(self) -> int:
        """The number of variables so far."""
        return len(self._costs)

    def binary(self, *, lower: float = 0.0, upper: float = 1.0, cost: float = 0.0) -> int:
        """Add an integral variable, by default 0 or 1, and return its column."""
        return self._column(lower, upper, cost, 1)

    def real(self, *, lower: float, upper: float, cost: float = 0.0) -> int:
        return self._column(lower, upper, cost, 0)

    def _column(self, lower: float, upper: float, cost: float, integer: int) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self._costs.append(cost)
        self._integer.append(integer)
        return len(self._costs) - 1

    def row(
        self,
        terms: Iterable[tuple[int, float]],
        *,
        lower: float = -np.inf,
        upper: float = np.inf,
        group: int = -1,
    ) -> None:
        """Add ``lower <= sum of coefficient * column <= upper``; each column at most once.

        Rows of a group may be left out until a solution violates one; -1: never. An equation in a
        group defines its first column.
        """
        for column, coefficient in terms:
            if coefficient:
                self._indices.append(column)
                self._coefficients.append(coefficient)
        self._starts.append(len(self._indices))
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        self._groups.append(group)

    def build(self) -> LinearProgram:
        return LinearProgram(
            costs=np.array(self._costs),
            lower=np.array(self._lower),
            upper=np.array(self._upper),
            integer=np.array(self._integer, dtype=np.int32),
            row_lower=np.array(self._row_lower),
            row_upper=np.array(self._row_upper),
            starts=np.array(self._starts, dtype=np.int32),
            indices=np.array(self._indices, dtype=np.int32),
            coefficients=np.array(self._coefficients),
            groups=np.array(self._groups, dtype=np.int32),
        )


class SolveOptions(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float  # wall time
    gap: float = 0.0  # stop when objective - bound is at most this (in the objective's unit)
    target: float = float("-inf")  # stop at a solution at most this good; ``-inf``: never
    # Branch-and-bound nodes; with it the answer does not depend on the machine's speed
    nodes: int | None = None
    seed: int = 0  # the solver's random seed
    relax: bool = False  # solve the linear relaxation
    threads: int = 1  # threads of the solver
    solver: str = "highs"  # ``"highs"`` or ``"gurobi"``


@dataclass(frozen=True)
class Solution:
    """The result of a solver."""

    # ``"optimal"``: solved to the gap asked for. ``"feasible"``: a solution, stopped early.
    # ``"infeasible"``: proven. ``"unknown"``: stopped without a solution.
    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    values: Floats | None  # (columns,): the best solution
    objective: float  # its objective; ``inf`` without one
    bound: float  # a proven lower bound on the objective; ``-inf`` if none, ``inf`` if infeasible
    started_from: bool = False  # whether the start that was given became the first solution


def to_bytes(message: Any) -> bytes:
    """Return a value with arrays in it for another process."""
    return msgspec.msgpack.encode(
        message, enc_hook=lambda array: (array.dtype.str, array.tobytes())
    )


def from_bytes(data: bytes, kind: type[Message]) -> Message:
    """Return the value that `to_bytes` was given."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_array_of)


def _array_of(_: type, written: tuple[str, bytes]) -> npt.NDArray[Any]:
    return np.array(np.frombuffer(written[1], written[0]))
