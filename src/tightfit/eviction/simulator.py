"""A recorded program replayed in a budget, by the C++ core."""

from __future__ import annotations

import random
from functools import cached_property
from typing import get_args

from tightfit._core import _engine
from tightfit.errors import BadInput
from tightfit.eviction.log.resolve import Log
from tightfit.eviction.log.views import without_views
from tightfit.eviction.policies.policy import Policy
from tightfit.eviction.replayed import (
    Deallocation,
    Moment,
    MomentKind,
    Placement,
    Replayed,
    Rules,
    Status,
)

USUAL_RULES = Rules()

_STATUS: tuple[Status, ...] = get_args(Status)
_DEALLOCATION: tuple[Deallocation, ...] = get_args(Deallocation)
_PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
_MOMENTS: tuple[MomentKind, ...] = get_args(MomentKind)


class Simulator:
    """Replays one log, any number of times."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def budget_at(self, ratio: float) -> int:
        """Return a budget in bytes, given as a share of the peak with nothing evicted."""
        return int(self.log.base_peak_bytes * ratio)

    def simulate(
        self,
        policy: Policy,
        budget_bytes: int,
        rules: Rules = USUAL_RULES,
        *,
        seed: int = 0,
        with_moments: bool = False,
    ) -> Replayed:
        """Return the result of running the program in a budget.

        `budget_bytes`: bytes for everything resident, constants included. `seed`: of the random
        policy. `with_moments`: also return every eviction and rematerialisation. Raises `BadInput`
        if the log uses a tensor that banishing has freed.
        """
        try:
            counts, moments = _engine.replay(
                self._recorded if policy.views_run_again else self._recorded_without_views,
                cost=policy.cost,
                by_size=policy.by_size,
                by_staleness=policy.by_staleness,
                keeps_dead=policy.keeps_dead,
                backward_last=policy.backward_last,
                deallocation=_DEALLOCATION.index(rules.deallocation),
                placement=_PLACEMENTS.index(rules.placement),
                budget=budget_bytes,
                most_again=int(self.log.base_cost_ns * (rules.thrash - 1.0)),
                draw=random.Random(seed).randrange,
                with_moments=with_moments,
            )
        except ValueError as error:
            name = self.log.tensors[int(str(error))].name
            raise BadInput(f"{name!r} is used after its end") from error
        return Replayed(
            status=_STATUS[counts.status],
            budget_bytes=budget_bytes,
            max_memory_bytes=counts.max_memory,
            total_cost_ns=counts.total_cost,
            evictions_pressure=counts.evicted,
            evictions_eager=counts.evicted_eager,
            rematerialisations=counts.again,
            rematerialised_outputs=counts.outputs_again,
            evaluations=counts.evaluations,
            accesses=counts.evaluations + counts.looks,
            max_depth=counts.max_depth,
            moments=tuple(Moment(_MOMENTS[kind], *rest) for kind, *rest in moments),
        )

    @cached_property
    def _recorded(self) -> _engine.Recorded:
        return _recorded(self.log)

    @cached_property
    def _recorded_without_views(self) -> _engine.Recorded:
        return _recorded(without_views(self.log))


def _recorded(log: Log) -> _engine.Recorded:
    return _engine.Recorded(
        storage_bytes=[storage.size_bytes for storage in log.storages],
        tensors=[(t.storage, t.operator, t.is_root) for t in log.tensors],
        costs=[operator.cost_ns for operator in log.operators],
        arguments=[operator.arguments for operator in log.operators],
        outputs=[operator.outputs for operator in log.operators],
        occurrences=log.occurrences,
        held=log.held,
    )
