"""Values in far memory at the one cut, and the limit that the link sets for them.

A transfer takes its time in the queue of its direction, in any order. So stores that have ended by
an instant took no longer, together, than has passed until then. Loads that are to come take no
longer than is left. Time is the cost of ops, and *waits*: real columns for stalls and for ops that
the program does not see. The rows hold for every plan, hence so does the bound. A program with far
memory has one cut: further ones raise no bound (docs/search.md, "Far memory").
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from tightfit.planners.anytime.kcut.variables import MoveColumns, Variables
from tightfit.planners.solvers.program import Terms


def limit_moves(variables: Variables, moving: MoveColumns) -> None:
    """Add the rows of values that may be moved."""
    _either_near_or_away(variables, moving)
    _capacity(variables, moving)
    _stores(variables, moving)
    _loads(variables, moving)


def _either_near_or_away(variables: Variables, moving: MoveColumns) -> None:
    """X[v] + A[v] <= 1: a value that is near is not needed far away."""
    for value, column in moving.away.items():
        if (0, value) in variables.resident:
            variables.builder.row([(column, 1.0), (variables.resident[0, value], 1.0)], upper=1.0)


def _capacity(variables: Variables, moving: MoveColumns) -> None:
    """sum_v m_v A[v] <= capacity of far memory."""
    sizes = variables.relaxed.problem.sizes
    unit = max(1, variables.budget_bytes)
    terms = [(column, sizes[value] / unit) for value, column in moving.away.items()]
    variables.builder.row(terms, upper=moving.far.capacity_bytes / unit)


def _stores(variables: Variables, moving: MoveColumns) -> None:
    """sum_v out_v A[v] <= the time that has passed since any instant.

    Values made from an instant on can only have left after it.
    """
    producers = variables.relaxed.problem.producers
    for start, _ in moving.waits_before:
        made = [value for value in moving.away if producers[value] >= start]
        wanted = _transfers(variables, moving, made, moving.far.store_s)
        passed, constant = _time(variables, moving, start, variables.cuts[0])
        variables.builder.row([*wanted, *passed], upper=constant)


def _loads(variables: Variables, moving: MoveColumns) -> None:
    """sum_v in_v A[v] <= the time that is left until the end, and until any instant.

    An input that a first computation reads before an instant has come back by then, unless it is
    computed again. Then R[i] raises the row's bound by its time.
    """
    load_s, (cut,) = moving.far.load_s, variables.cuts
    producers = variables.relaxed.problem.producers
    everything = _transfers(variables, moving, moving.away, load_s)
    left, constant = _time(variables, moving, cut, variables.relaxed.ops)
    variables.builder.row([*everything, *left], upper=constant)
    due = _first_readers(variables, cut)
    for end, _ in moving.waits_after[1:]:
        early = [value for value in moving.away if due.get(value, end) < end]
        wanted = _transfers(variables, moving, early, load_s)
        lifted: dict[int, float] = {}
        for value in early:
            made = variables.computed.get((0, producers[value]))
            if made is not None:
                lifted[made] = lifted.get(made, 0.0) - _percent(variables, value, load_s)
        passed, constant = _time(variables, moving, cut, end)
        for column, coefficient in passed:
            lifted[column] = lifted.get(column, 0.0) + coefficient
        variables.builder.row([*wanted, *lifted.items()], upper=constant)


def _transfers(
    variables: Variables,
    moving: MoveColumns,
    values: Collection[int],
    took_s: Callable[[int], float],
) -> Terms:
    """Time that those of these values which are away at the cut take of the link."""
    return [(moving.away[value], _percent(variables, value, took_s)) for value in values]


def _percent(variables: Variables, value: int, took_s: Callable[[int], float]) -> float:
    """How long a transfer takes, in the program's unit of cost."""
    problem = variables.relaxed.problem
    return took_s(problem.sizes[value]) / problem.cost_unit_s * variables.cost(1)


def _first_readers(variables: Variables, cut: int) -> dict[int, int]:
    """For each value made before a cut, the first op from there on that must run and reads it."""
    relaxed = variables.relaxed
    found: dict[int, int] = {}
    for op in range(cut, relaxed.ops):
        for value in relaxed.first_reads[op] if relaxed.problem.required[op] else ():
            found.setdefault(value, op)
    return found


def _time(variables: Variables, moving: MoveColumns, start: int, end: int) -> tuple[Terms, float]:
    """At least the time between the first computations of two ops.

    Terms to be subtracted, as `row` takes them, and a constant. `start` and `end` are the cut, or
    one of the instants at which pieces of waits begin, or the ends of the step.
    """
    relaxed, (cut,) = variables.relaxed, variables.cuts
    waits = (*moving.waits_before, *moving.waits_after)
    terms = [(column, -1.0) for op, column in waits if start <= op < end]
    constant = sum(
        variables.cost(relaxed.first_cost[op])
        for op in range(start, min(end, cut))
        if relaxed.problem.required[op]
    )
    for (_, op), column in variables.computed.items() if end > cut else ():
        if op < cut or not relaxed.problem.required[op] or start <= op < end:
            cost = relaxed.again_cost[op] if op < cut else relaxed.first_cost[op]
            terms.append((column, -variables.cost(cost)))
    terms += [(column, -cost) for column, cost in variables.extra_costs]
    return terms, constant
