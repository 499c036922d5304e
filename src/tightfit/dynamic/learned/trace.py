"""A training step as it ran: operators on numbered contents, what ended when, what it took.

Contents are numbered in the order in which the step meets or makes them, so two steps are the
same program on the same sizes exactly if their traces are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

__all__ = ["OVERWRITTEN", "Asked", "Made", "Met", "Signature", "Trace"]

OVERWRITTEN = -2
"""The end of a content that another one took the storage of."""


class Asked(NamedTuple):
    """An operator about to run: the contents it reads, and those that it only writes over."""

    function: Any
    reads: tuple[int, ...]
    unread: tuple[int, ...]


class Made(NamedTuple):
    """A content that an operator made.

    `over` is the content whose storage it took, -1 for a new storage; `repeats` says whether it
    can be computed again.
    """

    number: int
    over: int
    size_bytes: int
    repeats: bool


class Met(NamedTuple):
    """A content that was there when the step first used it; can it be computed again?"""

    number: int
    size_bytes: int
    repeats: bool


Signature = tuple[tuple[Asked, ...], tuple[tuple[Made, ...], ...], tuple[Met, ...]]


@dataclass(frozen=True)
class Trace:
    """A step as it ran. Positions count operators: at position n, n of them have finished.

    Parameters
    ----------
    asked, made, met : tuple
        Per operator what it read and made; what it met, by number. Two steps are the same if
        these are.
    ends : tuple of int
        Per content the position at which the program held it no longer, or `OVERWRITTEN`; the
        number of operators if it holds it still, and for what it met.
    settled : tuple of (int, int)
        Position and content: from there on it stays.
    cost_ns, workspace_bytes : tuple of int
        Per operator: time of the processor; what it took beside its results at most.
    beside_bytes : tuple of (int, int)
        Positions, and what was held there beside contents that the step made and may evict.
    again_ns : int
        Time of the processor that was spent on computing again.
    again : int
        How often an operator ran again.
    """

    asked: tuple[Asked, ...]
    made: tuple[tuple[Made, ...], ...]
    met: tuple[Met, ...]
    ends: tuple[int, ...]
    settled: tuple[tuple[int, int], ...]
    cost_ns: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    beside_bytes: tuple[tuple[int, int], ...]
    again_ns: int
    again: int

    @cached_property
    def signature(self) -> Signature:
        """What two steps that run the same program on the same sizes share."""
        return self.asked, self.made, self.met

    def merged(self, later: Trace) -> Trace:
        """Return what two runs of the same step say of it.

        The least time of each operator, for nothing else disturbed that one; the most workspace.
        """
        return replace(
            later,
            cost_ns=tuple(map(min, self.cost_ns, later.cost_ns)),
            workspace_bytes=tuple(map(max, self.workspace_bytes, later.workspace_bytes)),
            again_ns=min(self.again_ns, later.again_ns),
        )

    def begins(self, asked: list[Asked], made: list[tuple[Made, ...]], met: list[Met]) -> bool:
        """Whether a step that has come so far may still be this one."""
        return (
            self.asked[: len(asked)] == tuple(asked)
            and self.made[: len(made)] == tuple(made)
            and self.met[: len(met)] == tuple(met)
        )

    def meets(self, met: list[Met], first: int) -> bool:
        """Whether it has met the same, from one on."""
        return self.met[first : len(met)] == tuple(met[first:])
