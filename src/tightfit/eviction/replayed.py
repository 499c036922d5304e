"""What a simulation is asked and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Deallocation", "Moment", "MomentKind", "Replayed", "Status"]

Status: TypeAlias = Literal["ok", "oom", "thrash"]

Deallocation: TypeAlias = Literal["eager", "banish", "ignore"]
"""What happens when the program drops its last hold of a storage (appendix C.5)."""


MomentKind: TypeAlias = Literal["evict", "evict_eager", "remat", "remat_sibling"]


class Moment(NamedTuple):
    """An eviction or a rematerialisation, for those who look closely.

    Parameters
    ----------
    kind : str
        ``"evict"`` for want of memory, ``"evict_eager"`` because nobody holds it; ``"remat"`` of
        a tensor that was asked for, ``"remat_sibling"`` of another output of its operator.
    clock_ns : int
        Nanoseconds computed so far, from 1.
    operator : int
        The operator that was to run for the first time.
    tensor : int
        Which tensor; of an evicted storage the root.
    memory_bytes : int
        Bytes resident afterwards.
    """

    kind: MomentKind
    clock_ns: int
    operator: int
    tensor: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of one replay.

    Parameters
    ----------
    status : str
        ``"ok"``; ``"oom"``: nothing was left to evict; ``"thrash"``: recomputation came to cost
        more than the limit. What follows then counts up to that point.
    budget_bytes, max_memory_bytes : int
        What was given, and the most that was resident.
    total_cost_ns : int
        Nanoseconds of all operators that ran.
    evictions_pressure, evictions_eager : int
        Storages evicted for want of memory, and because nobody held them.
    rematerialisations, rematerialised_outputs : int
        Operators that ran again, and outputs that came back by that.
    evaluations, accesses : int
        Scores computed; these, and storages and classes looked at for them (appendix D.3).
    max_depth : int
        Operators that waited for one another at once.
    moments : tuple of Moment
        Each eviction and rematerialisation, if they were asked for.
    """

    status: Status
    budget_bytes: int
    max_memory_bytes: int
    total_cost_ns: int
    evictions_pressure: int
    evictions_eager: int
    rematerialisations: int
    rematerialised_outputs: int
    evaluations: int
    accesses: int
    max_depth: int
    moments: tuple[Moment, ...] = field(default=(), repr=False)

    @property
    def evictions(self) -> int:
        """All evictions."""
        return self.evictions_pressure + self.evictions_eager
