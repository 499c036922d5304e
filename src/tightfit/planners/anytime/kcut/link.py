"""Values in far memory at a cut, and the limit that the link sets for them.

A transfer takes its time in the queue of its direction, in any order. So stores that have ended by
an instant took no longer, together, than has passed until then. Loads that are to come take no
longer than is left. Time is the cost of ops, and *waits*: real columns for stalls and for ops that
the program does not see. The rows hold for every plan, hence so does the bound.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from itertools import pairwise

from tightfit.planners.anytime.kcut.variables import Variables, at_cut
from tightfit.planners.solvers.program import Terms


def away_has_a_source(variables: Variables, k: int) -> None:
    """A[k,v] <= X[k-1,v] + A[k-1,v] + R[k-1,i] for the op i that makes v."""
    if k == 0:
        return
    for value, column in at_cut(variables.away, k):
        variables.builder.row([(column, 1.0), *_sources(variables, k - 1, value)], upper=0.0)


def _sources(variables: Variables, k: int, value: int) -> Terms:
    """Where a value can have been at a cut, or been made in its window."""
    producer = variables.relaxed.problem.producers[value]
    columns = [
        variables.resident.get((k, value)),
        variables.away.get((k, value)),
        variables.computed.get((k, producer)),
    ]
    return [(column, -1.0) for column in columns if column is not None]


def either_near_or_away(variables: Variables, k: int) -> None:
    """X[k,v] + A[k,v] <= 1: a value that is near is not needed far away."""
    for value, column in at_cut(variables.away, k):
        if (k, value) in variables.resident:
            variables.builder.row([(column, 1.0), (variables.resident[k, value], 1.0)], upper=1.0)


def capacity(variables: Variables, k: int) -> None:
    """sum_v m_v A[k,v] <= capacity of far memory."""
    assert variables.moving is not None
    sizes = variables.relaxed.problem.sizes
    limit = variables.moving.far.capacity_bytes
    unit = max(1, variables.budget_bytes)
    terms = [(column, sizes[value] / unit) for value, column in at_cut(variables.away, k)]
    variables.builder.row(terms, upper=limit / unit)


def stores(variables: Variables, k: int) -> None:
    """sum_v out_v A[k,v] <= the time that has passed; at the first cut, since any instant.

    Values made from an instant on can only have left after it.
    """
    assert variables.moving is not None
    far, producers = variables.moving.far, variables.relaxed.problem.producers
    starts = [op for op, _ in variables.moving.waits.before] if k == 0 else [0]
    for start in starts:
        wanted = _away(variables, k, far.store_s, lambda v, start=start: producers[v] >= start)
        passed, constant = _time(variables, start, variables.cuts[k])
        variables.builder.row([*wanted, *passed], upper=constant)


def loads(variables: Variables, k: int) -> None:
    """sum_v in_v A[k,v] <= the time that is left; at the last cut, until any instant.

    An input that a first computation reads before an instant has come back by then, unless it is
    computed again. Then R[k,i] raises the row's bound by its time.
    """
    assert variables.moving is not None
    far, ops = variables.moving.far, variables.relaxed.ops
    everything = _away(variables, k, far.load_s, lambda _: True)
    left, constant = _time(variables, variables.cuts[k], ops)
    variables.builder.row([*everything, *left], upper=constant)
    if k < len(variables.cuts) - 1:
        return
    due = _first_readers(variables, variables.cuts[k])
    for end, _ in variables.moving.waits.after[1:]:
        early = {value for value, reader in due.items() if reader < end}
        wanted = _away(variables, k, far.load_s, early.__contains__)
        lifted: dict[int, float] = {}
        for value, _ in at_cut(variables.away, k):
            made = variables.computed.get((k, variables.relaxed.problem.producers[value]))
            if value in early and made is not None:
                lifted[made] = lifted.get(made, 0.0) - _percent(variables, value, far.load_s)
        passed, constant = _time(variables, variables.cuts[k], end)
        for column, coefficient in passed:
            lifted[column] = lifted.get(column, 0.0) + coefficient
        variables.builder.row([*wanted, *lifted.items()], upper=constant)


def _away(
    variables: Variables, k: int, took: Callable[[int], float], counts: Callable[[int], bool]
) -> Terms:
    """Time that the values which are away at a cut take of the link."""
    return [
        (column, _percent(variables, value, took))
        for value, column in at_cut(variables.away, k)
        if counts(value)
    ]


def _percent(variables: Variables, value: int, took: Callable[[int], float]) -> float:
    """How long a transfer takes, in the program's unit of cost."""
    problem = variables.relaxed.problem
    return took(problem.sizes[value]) / problem.cost_unit_s * variables.cost(1)


def _first_readers(variables: Variables, cut: int) -> dict[int, int]:
    """For each value made before a cut, the first op from there on that must run and reads it."""
    relaxed = variables.relaxed
    found: dict[int, int] = {}
    for op in range(cut, relaxed.ops):
        for value in relaxed.first_reads[op] if relaxed.problem.required[op] else ():
            found.setdefault(value, op)
    return found


def _time(variables: Variables, start: int, end: int) -> tuple[Terms, float]:
    """At least the time between the first computations of two ops.

    Terms to be subtracted, as `row` takes them, and a constant. `start` and `end` are cuts, or
    one of the instants at which pieces of waits begin, or the ends of the step.
    """
    assert variables.moving is not None
    relaxed, waits, cuts = variables.relaxed, variables.moving.waits, variables.cuts
    columns: list[int] = [column for op, column in waits.before if start <= op < end]
    inner = [k for k, (first, last) in enumerate(pairwise(cuts)) if start <= first and last <= end]
    columns += [waits.between[k] for k in inner]
    columns += [column for op, column in waits.after if start <= op < end]
    terms = [(column, -1.0) for column in columns]
    constant = sum(
        variables.cost(relaxed.first_cost[op])
        for op in range(start, min(end, cuts[0]))
        if relaxed.problem.required[op]
    )
    windows = _windows(cuts, start, end)
    for (window, op), column in variables.computed.items():
        anywhere = op < cuts[window] or not relaxed.problem.required[op]
        if window in windows and (anywhere or start <= op < end):
            cost = relaxed.again_cost[op] if op < cuts[window] else relaxed.first_cost[op]
            terms.append((column, -variables.cost(cost)))
    terms += [(column, -cost) for column, cost in variables.extra_costs]
    return terms, constant


def _windows(cuts: tuple[int, ...], start: int, end: int) -> Collection[int]:
    """The windows that overlap a stretch of the step."""
    return range(max(0, bisect_right(cuts, start) - 1), bisect_left(cuts, end))


LINK_FAMILIES: tuple[Callable[[Variables, int], None], ...] = (
    away_has_a_source,
    either_near_or_away,
    capacity,
    stores,
    loads,
)
"""Rows of one cut where values may be moved."""
