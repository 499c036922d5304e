"""Griewank and Walther's revolve: binomial checkpointing of a chain.

Algorithm 799 (2000): with s places for checkpoints a chain of l steps is reversed from an optimal
position. Advance to it, store it, reverse the part after it, and then the part before. New
checkpoints are stored while the reversal goes on, so a step may be advanced many times.
"""

from __future__ import annotations

from math import comb

from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.papers.checkpoints import forward_nodes
from tightfit.planners.papers.proposals import cheapest_that_fits
from tightfit.planners.papers.stages.schedule import forced_residency, hold, recompute
from tightfit.planners.papers.stages.staged import Staged, staged
from tightfit.progress import Progress


def plan_griewank(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Return the cheapest revolve schedule that fits, over all numbers of checkpoints."""
    problem = staged(task)
    places = range(len(forward_nodes(problem)), -1, -1)
    proposals = (revolve_schedule(problem, count) for count in places)
    return cheapest_that_fits(task, proposals, limits, progress, title="revolve")


def forward_steps(length: int, places: int) -> int:
    """Return the least number of forward steps to reverse a chain, the first sweep included.

    Griewank and Walther (2000), theorem 1: r l - beta(s + 1, r - 1) with the least r such that
    beta(s, r) = C(s + r, s) >= l. Here `places` does not count the input, which is always there.
    """
    snapshots = places + 1
    repeats = 0
    while comb(snapshots + repeats, snapshots) < length:
        repeats += 1
    if repeats == 0:
        return 0
    return repeats * length - comb(snapshots + repeats, snapshots + 1)


def held_checkpoints(length: int, places: int) -> list[frozenset[int]]:
    """Return, for each step of a chain, which steps' results are held while it is reversed."""
    held: list[frozenset[int]] = [frozenset()] * length
    pending: list[tuple[int, int, int, frozenset[int]]] = [(-1, length - 1, places, frozenset())]
    while pending:
        start, end, free, stored = pending.pop()
        if free == 0 or end - start <= 1:
            for step in range(start + 1, end + 1):
                held[step] = stored
            continue
        middle = start + _advance(end - start, free)
        pending.append((start, middle, free, stored))
        pending.append((middle, end, free - 1, stored | {middle}))
    return held


def _advance(length: int, places: int) -> int:
    """How far to go before storing, so that the fewest steps are taken again."""
    return min(
        range(1, length),
        key=lambda steps: (
            steps + forward_steps(length - steps, places - 1) + forward_steps(steps, places)
        ),
    )


def revolve_schedule(problem: Staged, places: int) -> list[Compute]:
    """Return the schedule of revolve with at most `places` checkpoints, the input not counted.

    A checkpoint stays while the steps behind it are reversed, and for the ops that read it then.
    """
    forward = forward_nodes(problem)
    step_of = {node: step for step, node in enumerate(forward)}
    held = held_checkpoints(len(forward), places) or [frozenset()]  # a step of backward only
    start = next((i for i, n in enumerate(problem.nodes) if not n.is_forward), len(problem.nodes))
    groups = _reversed_steps(problem, start)
    rows = forced_residency(problem)
    for reader, node in enumerate(problem.nodes):
        for value in node.first.reads:
            stored = problem.values[value]
            first = stored.begins
            if reader >= start and stored.producer is not None and stored.producer < start:
                begun = groups.index(groups[reader - start])  # backward nodes before its group
                if begun > 0:
                    at_hand = step_of.get(stored.producer) in held[groups[begun - 1]]
                    first = start + begun + (not at_hand)
            hold(rows, value, first, reader)
    for stage, step in enumerate(groups, start):
        for checkpoint in held[step]:
            for value in problem.nodes[forward[checkpoint]].first.writes:
                begins = problem.values[value].begins if stage == start else stage
                hold(rows, value, begins, stage)
    return recompute(problem, rows, ahead=False)


def _reversed_steps(problem: Staged, start: int) -> list[int]:
    """For each backward node, the forward step it reverses: the deepest one it reads from."""
    groups: list[int] = []
    forward = {node: step for step, node in enumerate(forward_nodes(problem))}
    step = len(forward) - 1
    for node in problem.nodes[start:]:
        producers = [problem.values[value].producer for value in node.first.reads]
        depths = [forward[p] for p in producers if p is not None and p in forward]
        step = min(step, max(depths, default=step))
        groups.append(step)
    return groups
