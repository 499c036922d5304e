"""Dijkstra's algorithm over states that say what may come next: for optima of small graphs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

State = TypeVar("State", bound=Hashable)


def shortest(
    start: State,
    moves: Callable[[State], Iterable[tuple[float, State]]],
    ending: Callable[[State], float | None],
) -> float:
    """Return the least cost of a path from a state to an end; ``inf`` if there is none.

    Parameters
    ----------
    moves : callable
        Returns what may follow a state, each with its cost.
    ending : callable
        Returns what it costs to end in a state; None: the path cannot end there.
    """
    best = {start: 0.0}
    queue = [(0.0, 0, start)]
    ticket = 0
    least = math.inf
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost >= least:
            break
        if cost > best[state]:
            continue
        last = ending(state)
        if last is not None:
            least = min(least, cost + last)
            continue
        for extra, following in moves(state):
            total = cost + extra
            if total < best.get(following, math.inf):
                best[following] = total
                ticket += 1
                heapq.heappush(queue, (total, ticket, following))
    return least
