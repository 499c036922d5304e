"""How the parts of a model share one budget: what each may save, what each may hold at its peak.

Parts that run one after the other hold their saved activations at the same time, but only one of
them is at its peak. Saving more in every part leaves less room for the peak of each: one number,
how far between the least and the most each part saves, is tried out, and the plans that make the
step cheapest are taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tightfit.api.options import Options
from tightfit.api.parts.kinds import Kind
from tightfit.api.parts.ledger import Holding, Ledger, holding_of
from tightfit.api.pipeline import plan_task, with_outside
from tightfit.planners.base import Task

__all__ = ["choose"]

_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


def choose(ledger: Ledger[Kind], limit_bytes: int, options: Options) -> dict[Kind, Holding] | None:
    """Return the plan of each kind of part that makes a step cheapest within a limit.

    Parameters
    ----------
    ledger : Ledger
        A measured step.
    limit_bytes : int
        Above the begin of the step.
    options : Options
        Say which planner searches, and how long.

    Returns
    -------
    dict or None
        None if no choice was found that fits.
    """
    kinds = dict.fromkeys(ledger.calls)
    found = [{kind: kind.least for kind in kinds}]
    for share in _SHARES:
        saved = {kind: _saved_bytes(kind, share) for kind in kinds}
        chosen = {
            kind: holding
            for kind in kinds
            if (
                holding := _planned(
                    kind, saved[kind], ledger.room(kind, saved, limit_bytes), options
                )
            )
        }
        if len(chosen) == len(kinds):
            found.append(chosen)
    fitting = [chosen for chosen in found if ledger.peak_with(chosen) <= limit_bytes]
    return min(fitting, key=lambda chosen: _cost_s(ledger, chosen), default=None)


def _saved_bytes(kind: Kind, share: float) -> int:
    """Return a share of the way from the least to the most that a part may save."""
    least, most = kind.least.saved_bytes, kind.most.saved_bytes
    return least + round(share * max(0, most - least))


def _cost_s(ledger: Ledger[Kind], chosen: Mapping[Kind, Holding]) -> float:
    return sum(chosen[kind].cost_s for kind in ledger.calls)


def _planned(kind: Kind, saved_bytes: int, room_bytes: int, options: Options) -> Holding | None:
    """Return the cheapest plan found that keeps to what may be saved and held at the peak."""
    graph = kind.captured.graph
    outside_bytes = max(0, room_bytes - saved_bytes - kind.output_bytes)
    if room_bytes <= 0:
        return None
    if kind.most.saved_bytes <= saved_bytes and kind.most.peak_bytes <= room_bytes:
        return kind.most
    seconds = options.limits.seconds / len(_SHARES)
    task = Task(
        graph=with_outside(graph, outside_bytes), budget_bytes=graph.constant_bytes + room_bytes
    )
    limits = msgspec.structs.replace(options.limits, seconds=seconds)
    plan = plan_task(task, options.planner, limits, options.progress).plan
    return holding_of(graph, plan) if plan is not None else None
