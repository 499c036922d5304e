"""The rules and the results of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Status: TypeAlias = Literal["ok", "oom", "thrash"]

Deallocation: TypeAlias = Literal["eager", "banish", "ignore"]
"""The action when the program drops its last hold of a storage (appendix C.5)."""

Placement: TypeAlias = Literal["bytes", "arena", "neighbours", "window", "mixed"]
"""The aim of an eviction: bytes, or a hole in an arena of the budget's size. There a score's
bytes are the storage's own (``"arena"``), or with the holes next to it (``"neighbours"``). Or the
neighbours that cost least are evicted together: always (``"window"``), or if enough bytes are free
in all (``"mixed"``).
"""


@dataclass(frozen=True)
class Rules:
    """Rules by which a program is replayed in a budget."""

    # When the program drops its last hold of a storage, it is evicted (``"eager"``), gone for good
    # as soon as nothing evicted may need it (``"banish"``), or nothing happens (``"ignore"``)
    deallocation: Deallocation = "eager"
    # ``"bytes"``: memory is a number, as in the paper. Else the budget is an arena, and an eviction
    # must make a hole in it
    placement: Placement = "bytes"
    # Give up when the time computed exceeds the program's own by this factor
    thrash: float = 2.0


MomentKind: TypeAlias = Literal["evict", "evict_eager", "remat", "remat_sibling"]


class Moment(NamedTuple):
    """An eviction or a rematerialisation, for close inspection."""

    # ``"evict"`` for want of memory, ``"evict_eager"`` because it is not held; ``"remat"`` of a
    # tensor that was asked for, ``"remat_sibling"`` of another output of its operator
    kind: MomentKind
    clock_ns: int  # nanoseconds computed so far, from 1
    operator: int  # the operator that was to run for the first time
    tensor: int  # which tensor; of an evicted storage the root
    memory_bytes: int  # bytes resident afterwards


@dataclass(frozen=True, kw_only=True)
class Replayed:
    # ``"ok"``; ``"oom"``: nothing was left to evict; ``"thrash"``: recomputation came to cost more
    # than the limit. The fields below then count up to that point.
    status: Status
    # budget_bytes, max_memory_bytes: the budget, and the most that was resident
    budget_bytes: int
    max_memory_bytes: int
    total_cost_ns: int  # nanoseconds of all operators that ran
    # evictions_pressure, evictions_eager: storages evicted for want of memory, and because they
    # were not held
    evictions_pressure: int
    evictions_eager: int
    # rematerialisations, rematerialised_outputs: operators that ran again, and outputs that came
    # back with them
    rematerialisations: int
    rematerialised_outputs: int
    # evaluations, accesses: scores computed; these, and storages and classes looked at for them
    # (appendix D.3)
    evaluations: int
    accesses: int
    max_depth: int  # operators that waited for one another at once
    # Each eviction and rematerialisation, if they were asked for
    moments: tuple[Moment, ...] = field(default=(), repr=False)

    @property
    def evictions(self) -> int:
        return self.evictions_pressure + self.evictions_eager
