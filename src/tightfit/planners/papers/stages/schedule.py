"""Schedules of the papers: from residency between stages to an ordered list of computes and back.

``S``, the values resident when each stage begins, determines everything else: the least
recomputation for a given S is a traversal per stage (Checkmate, section 5.1.1).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from tightfit.errors import BadInput
from tightfit.graph.changes import bits
from tightfit.graph.ir import ValueId
from tightfit.plan.plan import Compute
from tightfit.planners.papers.stages.staged import Implementation, Residency, Staged


def hold(rows: Residency, value: ValueId, first: int, last: int) -> None:
    """Add a value to those resident when stages `first` to `last`, both included, begin."""
    for stage in range(first, min(last + 1, len(rows))):
        rows[stage] |= 1 << value


def kept_residency(problem: Staged) -> Residency:
    rows = [0] * (len(problem.nodes) + 1)
    for value, stored in problem.values.items():
        hold(rows, value, stored.begins, stored.forced_until - 1)
    return rows


def forced_residency(problem: Staged) -> Residency:
    """Return the residency of kept values and of values that cannot be computed again.

    A value that is not recoverable stays from its first computation to its last possible reader.
    """
    rows = kept_residency(problem)
    last = last_uses(problem)
    for value, stored in problem.values.items():
        if not stored.recoverable:
            hold(rows, value, stored.begins, min(last[value], stored.ends - 1))
    return rows


def last_uses(problem: Staged, *, forward_again: bool = False) -> dict[ValueId, int]:
    """For each value, the last stage in which any node can have a use for it (-1: none).

    A node that may be computed again is of use as long as one of the values it then makes is.

    `forward_again`: whether only forward nodes are ever computed again.
    """
    last = dict.fromkeys(problem.values, -1)
    for node in range(len(problem.nodes) - 1, -1, -1):
        for value in problem.nodes[node].first.reads:
            last[value] = max(last[value], node)
        again = problem.nodes[node].again
        if again is None or (forward_again and not problem.nodes[node].is_forward):
            continue
        useful = useful_until(problem, again, last)
        for value in again.reads:
            last[value] = max(last[value], useful)
    return last


def useful_until(problem: Staged, again: Implementation, last: Mapping[ValueId, int]) -> int:
    """Return the last stage in which a later computation can have a use (-1: none).

    `last`: for each value the last stage in which a node can have a use for it.
    """
    return max((last[v] for v in again.writes if problem.values[v].recoverable), default=-1)


def recompute(problem: Staged, residency: Sequence[int], *, ahead: bool = True) -> list[Compute]:
    """Return the computes of the least recomputation for a given residency.

    `residency`: n + 1 bit sets of values; values that cannot be dropped are added. `ahead`: what to
    do where a value becomes resident: True computes it in the stage before, as Checkmate's S means
    it; False reads S as a wish, met by values resident anyway. Raises `BadInput` if a needed value
    is neither resident nor recoverable.
    """
    forced = forced_residency(problem)
    rows = [asked | least for asked, least in zip(residency, forced, strict=True)]
    computes: list[Compute] = []
    resident = rows[0]
    for stage in range(len(problem.nodes)):
        starts = rows[stage + 1] & ~resident if ahead else 0
        chosen, made = _stage_nodes(problem, stage, resident, starts)
        computes += [problem.nodes[node].implementation(node == stage).compute for node in chosen]
        resident = rows[stage + 1] & (resident | made | forced[stage + 1])
    return computes


def _stage_nodes(problem: Staged, stage: int, resident: int, starts: int) -> tuple[list[int], int]:
    """The nodes of one stage in index order, and the values they make."""
    wanted = [-stage]  # a heap: the largest node first
    for value in bits(starts):
        producer = problem.values[value].producer
        if producer is not None and problem.may_recompute(producer, stage):
            heapq.heappush(wanted, -producer)
    made = 0
    chosen: list[int] = []
    while wanted:
        node = -heapq.heappop(wanted)
        if chosen and chosen[-1] == node:
            continue
        chosen.append(node)
        way = problem.nodes[node].implementation(node == stage)
        for value in way.writes:
            if problem.makes(node, node == stage, value):
                made |= 1 << value
        for value in way.reads:
            if not resident >> value & 1:
                heapq.heappush(wanted, -_producer_again(problem, value, stage))
    chosen.reverse()
    return chosen, made


def _producer_again(problem: Staged, value: ValueId, stage: int) -> int:
    stored = problem.values[value]
    producer = stored.producer
    if producer is None or not stored.recoverable or not problem.may_recompute(producer, stage):
        raise BadInput(
            f"value {value} is needed in stage {stage} but is neither resident nor may be "
            "computed again: the residency drops a value that has to stay"
        )
    return producer


def stages_of(problem: Staged, computes: Sequence[Compute]) -> list[list[int]]:
    """Split computes into stages: each list of nodes ends with a first computation.

    Computes of ops that are no nodes are left out; first computations are in the nodes' order.
    """
    position = {node.first.compute.op: index for index, node in enumerate(problem.nodes)}
    stages: list[list[int]] = [[]]
    for compute in computes:
        if compute.op not in position:
            continue
        node = position[compute.op]
        stages[-1].append(node)
        if node == len(stages) - 1:
            stages.append([])
    stages.pop()
    return stages


def residency_of(problem: Staged, computes: Sequence[Compute]) -> Residency:
    """Return values resident between the stages of a schedule, by the last use of instances.

    Computes of alternatives that the problem does not have are read as those it has.
    """
    count = len(problem.nodes)
    rows = [0] * (count + 1)
    alive = 0
    stages = stages_of(problem, computes)
    for stage in range(count - 1, -1, -1):
        for node in reversed(stages[stage]):
            again = problem.nodes[node].again
            way = problem.nodes[node].first if node == stage or again is None else again
            for value in way.writes:
                if node == stage or problem.values[value].recoverable:
                    alive &= ~(1 << value)
            for value in way.reads:
                alive |= 1 << value
        rows[stage] = alive
    kept = kept_residency(problem)
    return [row | least for row, least in zip(rows, kept, strict=True)]


def without_waste(problem: Staged, computes: Sequence[Compute]) -> list[Compute]:
    """Return the computes without the recomputations that are not read."""
    position = {node.first.compute.op: index for index, node in enumerate(problem.nodes)}
    first = {compute.op: index for index, compute in reversed(list(enumerate(computes)))}
    needed: set[ValueId] = set()
    useful: list[Compute] = []
    for index in range(len(computes) - 1, -1, -1):
        compute = computes[index]
        node = position[compute.op]
        is_first = first[compute.op] == index
        made = {
            value
            for value in problem.nodes[node].first.writes
            if problem.makes(node, is_first, value)
        }
        if is_first or made & needed:
            needed.difference_update(made)
            needed.update(problem.nodes[node].implementation(is_first).reads)
            useful.append(compute)
    useful.reverse()
    return useful
