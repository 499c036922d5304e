"""Chen's heuristics on chains, on articulation points, and on the linearised graph.

Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Checkpoint every sqrt(n)-th node,
or start a new segment whenever one has gathered b bytes, with a search over b. Checkmate, section
5.1, extends both to general graphs: candidates are the articulation points of the forward pass, or
all its nodes in topological order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

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


def plan_chen_sqrt(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Checkpoint every sqrt(n)-th node of a chain (Chen et al., 2016, section 4.1)."""
    return _plan_sqrt(task, limits, progress, forward_nodes, "Chen sqrt(n)")


def plan_chen_greedy(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Checkpoint a chain in segments of equal bytes (Chen et al., 2016, algorithm 3)."""
    return _plan_greedy(task, limits, progress, forward_nodes, "Chen greedy")


def plan_ap_sqrt(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Checkpoint every sqrt(n)-th articulation point (Checkmate, section 5.1.1)."""
    return _plan_sqrt(task, limits, progress, articulation_points, "AP sqrt(n)")


def plan_ap_greedy(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Checkpoint articulation points by segments of equal bytes (Checkmate, section 5.1.1)."""
    return _plan_greedy(task, limits, progress, articulation_points, "AP greedy")


def plan_linearised_sqrt(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Checkpoint every sqrt(n)-th node in topological order (Checkmate, section 5.1.2)."""
    return _plan_sqrt(task, limits, progress, forward_nodes, "linearised sqrt(n)")


def plan_linearised_greedy(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Checkpoint in segments of equal bytes in topological order (Checkmate, section 5.1.2)."""
    return _plan_greedy(task, limits, progress, forward_nodes, "linearised greedy")


def sqrt_segments(candidates: Sequence[int]) -> list[int]:
    """Return every k-th candidate, k the rounded square root of their number."""
    step = max(1, round(math.sqrt(len(candidates))))
    return list(candidates[step - 1 :: step])


def greedy_segments(problem: Staged, candidates: Sequence[int], limit_bytes: float) -> list[int]:
    """Return candidates such that about `limit_bytes` are made between two of them."""
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
