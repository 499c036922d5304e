"""The order in which a step that recomputes nothing needs the least memory that is found."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.graph.ir import OpId
from tightfit.planners.base import Task
from tightfit.planners.orders.frees_early import frees_early
from tightfit.planners.orders.problem import step_orders

_MOVES_PER_OP = 2000
_MOST_MOVES = 1_000_000
_MOST_FREEING = 3000  # ops of graphs for which the order that frees early is looked at
_NEAR = 1000  # an answer within a thousandth of the floor is enough


@dataclass(frozen=True)
class LeastPeak:
    """An order, with its peak and bound."""

    ops: tuple[OpId, ...]  # ops of the graph in the order in which they run
    # peak_bytes, traced_peak_bytes: of this order and of the traced one, nothing recomputed,
    # constants included
    peak_bytes: int
    traced_peak_bytes: int
    # No order that leaves every op in its segment needs less with nothing recomputed
    floor_bytes: int


def least_peak(
    task: Task, *, enough_bytes: int | None = None, seconds: float | None = None, seed: int = 0
) -> LeastPeak:
    """Return the best of four orders, improved by local moves; never worse than the traced order.

    The four are the traced order, the order that frees early, and two by list scheduling. These
    take the ready op that leaves the fewest bytes alive, from the first op on or from the last op
    back. A move lets an op, with all that it waits for, run before a position where memory is full,
    or after it with all that waits for it.

    `enough_bytes`: stop at a peak of at most this, constants included; below the floor local moves
    are not tried at all. None: a thousandth above the floor. `seconds`: wall time for local moves;
    None: as many moves as the graph's size asks for, so that the order depends on the seed only.
    """
    orders = step_orders(task)
    core, constant_bytes = orders.core, task.graph.constant_bytes
    starts = [orders.traced(), core.scheduled_forwards(), core.scheduled_backwards()]
    if len(starts[0]) <= _MOST_FREEING:
        starts.append(orders.from_graph(frees_early(task.graph)))
    peaks = [core.peak(order) for order in starts]
    best = starts[peaks.index(min(peaks))]
    floor = core.alive_between_groups()
    enough = None if enough_bytes is None else enough_bytes - constant_bytes
    if enough is None or min(peaks) > enough >= floor:
        floor = core.floor()
        enough = floor + floor // _NEAR if enough is None else enough
    if min(peaks) > enough >= floor:
        moves = min(_MOST_MOVES, _MOVES_PER_OP * len(best))
        best = core.lowered(best, enough, 1e6 if seconds is None else seconds, moves, seed)
    return LeastPeak(
        ops=orders.to_graph(best),
        peak_bytes=constant_bytes + core.peak(best),
        traced_peak_bytes=constant_bytes + peaks[0],
        floor_bytes=constant_bytes + floor,
    )
