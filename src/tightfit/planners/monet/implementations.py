"""The implementations MONeT chooses among: one per op (MONeT-NoOp) or all that serve."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.planners.stages.staged import Implementation, Staged

__all__ = ["Implementations", "one_each"]


@dataclass(frozen=True)
class Implementations:
    """For each node, the ways to compute it first and again (none: it may not be recomputed)."""

    first: tuple[tuple[Implementation, ...], ...]
    again: tuple[tuple[Implementation, ...], ...]


def one_each(problem: Staged) -> Implementations:
    """Return one implementation per op: MONeT-NoOp."""
    return Implementations(
        first=tuple((node.first,) for node in problem.nodes),
        again=tuple(() if node.again is None else (node.again,) for node in problem.nodes),
    )
