"""The constraint families of the K-cut program, one function each: the rows of one cut.

X, R, Y, D, E, P and B are `resident`, `computed`, `later`, `chosen`, `chosen_again`, `made_before`
and `branches`; numbers are the rows' in docs/search.md, "The K-cut program".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tightfit.planners.anytime.kcut.variables import Variables, at_cut
from tightfit.planners.solvers.program import Terms


def memory(variables: Variables, k: int) -> None:
    """sum_v m_v X[k,v] + results and workspace of the cut's op <= budget (1)."""
    relaxed, cut = variables.relaxed, variables.cuts[k]
    terms = [
        (column, variables.units(relaxed.problem.sizes[value]))
        for value, column in at_cut(variables.resident, k)
    ]
    least = min(size for _, _, size in relaxed.running(cut))
    least = least if relaxed.problem.required[cut] else 0
    for _, column, size in _running(variables, k):
        terms.append((column, variables.units(size - least)))
    variables.builder.row(terms, upper=variables.units(variables.budget_bytes - least))


def one_way_to_run(variables: Variables, k: int) -> None:
    """sum_w W[k,w] = 1 over the ways to run the cut's op; with alternatives D[t_k,a] for each (10).

    Alternatives with the same inputs may replace each other.
    """
    relaxed, cut = variables.relaxed, variables.cuts[k]
    ways = list(_running(variables, k))
    if not ways:
        return
    if not relaxed.has_choice(cut):
        variables.builder.row([(column, 1.0) for _, column, _ in ways], lower=1.0, upper=1.0)
        return
    reads: dict[frozenset[int], Terms] = {}
    for number, way in relaxed.first_alternatives(cut):
        terms = reads.setdefault(frozenset(way.reads), [])
        terms.append((variables.chosen[cut, number], -1.0))
        terms.extend((column, 1.0) for at, column, _ in ways if at == number)
    for terms in reads.values():
        variables.builder.row(terms, lower=0.0, upper=0.0)


def _running(variables: Variables, k: int) -> Iterator[tuple[int, int, int]]:
    """Yield the ways to run the op of a cut: alternative, column, bytes."""
    for number, ways in at_cut(variables.running, k):
        yield from ((number, column, size) for column, size in ways)


def one_alternative(variables: Variables, k: int) -> None:
    """sum_a D[j,a] = R[k,j] for first computations of the window (5); inputs of op t_k (2)."""
    relaxed, cut = variables.relaxed, variables.cuts[k]
    first, end = variables.window(k)
    for op in range(first, end):
        if not relaxed.has_choice(op):
            continue
        terms = [(variables.chosen[op, n], 1.0) for n, _ in relaxed.first_alternatives(op)]
        variables.builder.row([*terms, (variables.computed[k, op], -1.0)], lower=0.0, upper=0.0)
    if relaxed.has_choice(cut) and relaxed.problem.required[cut]:
        for value in _choice_reads(variables, cut):
            terms = _reading(variables, cut, value)
            variables.builder.row([*terms, (variables.resident[k, value], -1.0)], upper=0.0)


def one_alternative_before(variables: Variables, k: int) -> None:
    """sum_a D[j,a] = 1, of an optional op P[j], for first computations before the first cut (11).

    Their inputs were made: P[j] <= P[i], or the sum of D[j,a] over the alternatives that read
    results of i.
    """
    if k > 0:
        return
    relaxed, rows = variables.relaxed, variables.builder
    for op in range(variables.cuts[0]):
        made = variables.made_before.get(op)
        runs = [] if made is None else [(made, -1.0)]
        if relaxed.has_choice(op):
            terms = [(variables.chosen[op, n], 1.0) for n, _ in relaxed.first_alternatives(op)]
            least_runs = 1.0 if made is None else 0.0
            rows.row([*terms, *runs], lower=least_runs, upper=least_runs)
        for value in {v for _, way in relaxed.first_alternatives(op) for v in way.reads}:
            source = variables.made_before.get(relaxed.problem.producers[value])
            if source is None:
                continue
            if value not in relaxed.first_reads[op]:
                rows.row([*_reading(variables, op, value), (source, -1.0)], upper=0.0)
            else:
                least = 1.0 if made is None else 0.0
                rows.row([(source, 1.0), *runs], lower=least)


def one_branch(variables: Variables, k: int) -> None:
    """sum_b B[c,b] = 1 for linked choices; D[j,a] <= the sum over branches that have it (12)."""
    if k > 0:
        return
    for branches, columns in zip(
        variables.relaxed.problem.choices, variables.branches, strict=True
    ):
        variables.builder.row([(column, 1.0) for column in columns], lower=1.0, upper=1.0)
        for op in sorted({op for branch in branches for op, _ in branch}):
            for number, _ in variables.relaxed.first_alternatives(op):
                if (op, number) not in variables.chosen:
                    continue
                taken = zip(branches, columns, strict=True)
                having = [(column, -1.0) for branch, column in taken if (op, number) in branch]
                terms = [(variables.chosen[op, number], 1.0), *having]
                variables.builder.row(terms, upper=0.0)


def one_alternative_again(variables: Variables, k: int) -> None:
    """sum_a E[k,j,a] = R[k,j] for ops that run again in the window; their inputs exist (8)."""
    relaxed = variables.relaxed
    for op in range(variables.cuts[k]):
        if (k, op) not in variables.computed or not relaxed.has_choice_again(op):
            continue
        ways = relaxed.again_alternatives(op)
        columns = {number: variables.chosen_again[k, op, number] for number, _ in ways}
        terms = [(column, 1.0) for column in columns.values()]
        variables.builder.row([*terms, (variables.computed[k, op], -1.0)], lower=0.0, upper=0.0)
        common = set(relaxed.again_reads[op])
        reads = {number: relaxed.reads_again(op, way) for number, way in ways}
        for value in sorted({v for own in reads.values() for v in own} - common):
            readers = [(columns[n], 1.0) for n, own in reads.items() if value in own]
            _add_input(variables, k, value, readers)


def optional_values_cost(variables: Variables, k: int) -> None:
    """X[1,v] <= P[i] for an optional op i that makes v: to be alive it was computed (9)."""
    if k > 0:
        return
    producers = variables.relaxed.problem.producers
    for value, column in at_cut(variables.resident, k):
        if producers[value] in variables.made_before:
            made = variables.made_before[producers[value]]
            variables.builder.row([(column, 1.0), (made, -1.0)], upper=0.0)


def residency_has_a_source(variables: Variables, k: int) -> None:
    """X[k,v] <= X[k-1,v] + R[k-1,i] for the op i that makes v (3)."""
    if k == 0:
        return
    relaxed, previous = variables.relaxed, variables.cuts[k - 1]
    for value, column in at_cut(variables.resident, k):
        producer = relaxed.problem.producers[value]
        if producer >= previous and relaxed.problem.required[producer]:
            continue
        variables.builder.row([(column, 1.0), *_sources(variables, k - 1, value)], upper=0.0)


def inputs_are_there(variables: Variables, k: int) -> None:
    """R[k,j] <= X[k,v] + A[k,v] + R[k,i] for every v that j reads and the op i that makes it (4).

    For values that only some alternatives read, R[k,j] is the sum of D[j,a] over these
    alternatives.
    """
    relaxed = variables.relaxed
    first, end = variables.window(k)
    for op in range(end):
        if (k, op) not in variables.computed:
            continue
        reads = relaxed.first_reads[op] if op >= first else relaxed.again_reads[op]
        for value in reads:
            _add_input(variables, k, value, [(variables.computed[k, op], 1.0)])
        if op >= first and relaxed.has_choice(op):
            for value in _choice_reads(variables, op):
                _add_input(variables, k, value, _reading(variables, op, value))


def _add_input(variables: Variables, k: int, value: int, readers: Terms) -> None:
    """Who reads a value in a window finds it resident at the cut or computed in the window."""
    relaxed, cut = variables.relaxed, variables.cuts[k]
    producer = relaxed.problem.producers[value]
    if producer >= cut and relaxed.problem.required[producer]:
        return
    variables.builder.row([*readers, *_sources(variables, k, value)], upper=0.0)


def _sources(variables: Variables, k: int, value: int) -> Terms:
    """Whether a cut holds a value or its window computes it; counted against its readers."""
    relaxed = variables.relaxed
    producer, terms = relaxed.problem.producers[value], _held_at(variables, k, value)
    makes = producer >= variables.cuts[k] or relaxed.rewritable[value]
    if makes and (k, producer) in variables.computed:
        terms.append((variables.computed[k, producer], -1.0))
    return terms


def _held_at(variables: Variables, k: int, value: int) -> Terms:
    """Whether a cut holds a value, here or in far memory; counted against its readers."""
    held = [variables.resident.get((k, value))]
    if variables.moving is not None:
        held.append(variables.moving.away.get(value))
    return [(column, -1.0) for column in held if column is not None]


def later_inputs_are_there(variables: Variables, k: int) -> None:
    """Y[k,j] <= R[k,j] + Y[k+1,j] (6) and Y[k,j] <= X[k,v] + Y[k,i] (7): each cut alone.

    They hold anyway; they tie the windows together and tighten the relaxation.
    """
    if k == len(variables.cuts) - 1:
        return
    relaxed, cut = variables.relaxed, variables.cuts[k]
    following = variables.computed if k + 1 == len(variables.cuts) - 1 else variables.later
    for op in range(relaxed.ops):
        if (k, op) not in variables.later:
            continue
        column = variables.later[k, op]
        if op < cut:
            terms = [(column, 1.0)]
            if (k, op) in variables.computed:
                terms.append((variables.computed[k, op], -1.0))
            if (k + 1, op) in following:
                terms.append((following[k + 1, op], -1.0))
            variables.builder.row(terms, upper=0.0)
        reads = relaxed.first_reads[op] if op >= cut else relaxed.again_reads[op]
        for value in reads:
            _add_later_input(variables, k, value, [(column, 1.0)])
        if op >= cut and relaxed.has_choice(op):
            for value in _choice_reads(variables, op):
                _add_later_input(variables, k, value, _reading(variables, op, value))


def _add_later_input(variables: Variables, k: int, value: int, readers: Terms) -> None:
    """Who reads a value after a cut finds it resident there or computed after it."""
    producer = variables.relaxed.problem.producers[value]
    if producer >= variables.cuts[k]:
        return
    terms = [*readers, *_held_at(variables, k, value)]
    if (k, producer) in variables.later and variables.relaxed.rewritable[value]:
        terms.append((variables.later[k, producer], -1.0))
    variables.builder.row(terms, upper=0.0)


def _reading(variables: Variables, op: int, value: int) -> Terms:
    """The columns of D of the alternatives that read a value."""
    return [
        (variables.chosen[op, number], 1.0)
        for number, way in variables.relaxed.first_alternatives(op)
        if value in way.reads
    ]


def _choice_reads(variables: Variables, op: int) -> list[int]:
    """Values that some but not all alternatives of a first computation read."""
    common = set(variables.relaxed.first_reads[op])
    ways = variables.relaxed.first_alternatives(op)
    return sorted({v for _, way in ways for v in way.reads} - common)


FAMILIES: tuple[Callable[[Variables, int], None], ...] = (
    memory,
    one_way_to_run,
    one_alternative,
    one_alternative_before,
    one_alternative_again,
    one_branch,
    optional_values_cost,
    residency_has_a_source,
    inputs_are_there,
    later_inputs_are_there,
)
"""All constraint families; each adds the rows of one cut and its window."""
