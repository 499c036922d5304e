"""Chen's heuristics on chains, on articulation points, and on the linearised graph.

Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Checkpoint every sqrt(n)-th node,
or start a new segment whenever one has gathered b bytes, with a search over b. Checkmate, section
5.1, extends both to general graphs: candidates are the articulation points of the forward pass, or
all its nodes in topological order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.papers.checkpoints import (
    articulation_points,
    checkpoint_schedule,
    forward_bytes,
    forward_nodes,
)
from tightfit.planners.papers.proposals import cheapest_that_fits
from tightfit.planners.papers.stages.staged import Staged, staged
from tightfit.progress import Progress

_THRESHOLDS = 60
_Candidates = Callable[[Staged], Sequence[int]]


def sqrt_segments(candidates: Sequence[int]) -> list[int]:
    """Return every k-th candidate, k the rounded square root of their number."""
    step = max(1, round(math.sqrt(len(candidates))))
    return list(candidates[step - 1 :: step])


def greedy_segments(problem: Staged, candidates: Sequence[int], limit_bytes: float) -> list[int]:
    """Return candidates such that about `limit_bytes` are made from each to the next."""
    allowed = set(candidates)
    chosen: list[int] = []
    gathered = 0
    for node in forward_nodes(problem):
        gathered += forward_bytes(problem, node)
        if node in allowed and gathered > limit_bytes:
            chosen.append(node)
            gathered = 0
    return chosen


def _plan_sqrt(
    task: Task, limits: Limits, progress: Progress, candidates: _Candidates, title: str
) -> Outcome:
    problem = staged(task)
    proposal = checkpoint_schedule(problem, set(sqrt_segments(candidates(problem))))
    return cheapest_that_fits(task, [proposal], limits, progress, title=title)


def _plan_greedy(
    task: Task, limits: Limits, progress: Progress, candidates: _Candidates, title: str
) -> Outcome:
    problem = staged(task)
    return cheapest_that_fits(
        task, _greedy_proposals(problem, candidates(problem)), limits, progress, title=title
    )


def _greedy_proposals(problem: Staged, candidates: Sequence[int]) -> Iterator[list[Compute]]:
    """Yield schedules for segment sizes from everything to nothing, without repeats."""
    total = sum(forward_bytes(problem, node) for node in forward_nodes(problem))
    seen: set[tuple[int, ...]] = set()
    for number in range(_THRESHOLDS + 1):
        chosen = tuple(greedy_segments(problem, candidates, total * 0.87**number))
        if chosen not in seen:
            seen.add(chosen)
            yield checkpoint_schedule(problem, set(chosen))


plan_chen_sqrt = partial(_plan_sqrt, candidates=forward_nodes, title="Chen sqrt(n)")
"""Chen et al. (2016), section 4.1: every sqrt(n)-th node of a chain."""
plan_chen_greedy = partial(_plan_greedy, candidates=forward_nodes, title="Chen greedy")
"""Algorithm 3: a chain in segments of equal bytes."""
plan_ap_sqrt = partial(_plan_sqrt, candidates=articulation_points, title="AP sqrt(n)")
plan_ap_greedy = partial(_plan_greedy, candidates=articulation_points, title="AP greedy")
"""Checkmate, section 5.1.1: the same on articulation points."""
plan_linearised_sqrt = partial(_plan_sqrt, candidates=forward_nodes, title="linearised sqrt(n)")
plan_linearised_greedy = partial(_plan_greedy, candidates=forward_nodes, title="linearised greedy")
"""Checkmate, section 5.1.2: the same in topological order."""
