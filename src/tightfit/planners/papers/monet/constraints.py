"""The constraint families of MONeT's program, one function each, by the paper's equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tightfit.graph.ir import ValueId
from tightfit.planners.papers.monet.variables import Variables
from tightfit.planners.papers.stages.scale import CAPACITY_UNITS
from tightfit.planners.papers.stages.staged import Implementation
from tightfit.planners.solvers.program import Terms


def forward_memory(variables: Variables) -> None:
    """c_i + |x_i| + |L_i| + sum over others of s^N_j |x_j| <= M (equations 1 and 4)."""
    for node in range(variables.forward):
        terms, constant = _forward_held(variables, node)
        ways = variables.implementations.first[node]
        constant += sum(variables.size(value) for value in ways[0].writes)
        working, own = _workspace(variables, 0, node, ways)
        terms += working
        constant += own
        terms.extend(_taken_over(variables, 0, node))
        variables.builder.row(terms, upper=CAPACITY_UNITS - constant)


def _workspace(
    variables: Variables, stage: int, node: int, ways: Sequence[Implementation]
) -> tuple[Terms, float]:
    """c_i: columns of the implementations, or a constant where there is only one."""
    if len(ways) == 1:
        return [], variables.units(ways[0].workspace_bytes)
    terms = [
        (variables.chosen[stage, node, number], variables.units(way.workspace_bytes))
        for number, way in enumerate(ways)
    ]
    return terms, 0.0


def _taken_over(variables: Variables, stage: int, node: int) -> Terms:
    """-|x_i| for an implementation that writes x_i over its input (appendix C.3)."""
    return [(column, -variables.size(v)) for v, column in variables.overwriting(stage, node)]


def _forward_held(variables: Variables, node: int) -> tuple[Terms, float]:
    """Live values when a forward node is about to run: columns, and bytes that surely are."""
    local = set(variables.local(0, node))
    terms: Terms = []
    constant = 0.0
    for value in variables.forward_values:
        stored = variables.problem.values[value]
        if stored.begins > node:
            continue
        if value in local or node < stored.forced_until:
            constant += variables.size(value)
        elif (1, value) in variables.stored:
            terms.append((variables.stored[1, value], variables.size(value)))
    return terms, constant


def saved_memory(variables: Variables) -> None:
    """|L^_k| + sum_{j<=i} |S^(k-1) and D_k| + sum_{j>i} s^k_j |x_j| <= M (equation 13).

    The sums are running columns: from a forward node to the next, values stored before make room
    for values stored afterwards.
    """
    builder = variables.builder
    for stage in range(1, variables.backward + 1):
        terms: Terms = [(variables.add_held(stage, 0), 1.0)]
        for value in variables.forward_values:
            if (stage, value) in variables.stored:
                terms.append((variables.stored[stage, value], -variables.size(value)))
        builder.row(terms, lower=0.0, upper=0.0, group=stage)
        for node in range(variables.forward):
            change, constant = _change(variables, stage, node)
            if change or constant:
                following = variables.add_held(stage, node + 1)
                row = [(following, 1.0), (variables.held[stage, node], -1.0), *change]
                builder.row(row, lower=constant, upper=constant, group=stage)
            else:
                variables.pass_held(stage, node + 1)


def _change(variables: Variables, stage: int, node: int) -> tuple[Terms, float]:
    """Terms that passing a node adds to equation 13: negated columns and a constant."""
    terms: Terms = []
    constant = 0.0
    for value in variables.problem.nodes[node].first.writes:
        size = variables.size(value)
        if not size:
            continue
        if (stage, value) in variables.stored:
            terms.append((variables.stored[stage, value], size))
        after, sure = _afterwards(variables, stage, value)
        terms.extend((column, -size * factor) for column, factor in after)
        constant += sure * size
    return _merged(terms), constant


def _merged(terms: Terms) -> Terms:
    merged: dict[int, float] = {}
    for column, coefficient in terms:
        merged[column] = merged.get(column, 0.0) + coefficient
    return [(column, coefficient) for column, coefficient in merged.items() if coefficient]


def _afterwards(variables: Variables, stage: int, value: ValueId) -> tuple[Terms, float]:
    """Whether a value is in S^(k-1) or D_k: columns with factors, and a constant (equation 10).

    With several implementations of the backward node: s + sum_l delta_l (1 - s), linearised.
    """
    node = variables.node_of(stage)
    ways = variables.implementations.first[node]
    reading = [number for number, way in enumerate(ways) if value in way.reads]
    if len(reading) == len(ways):
        return [], 1.0
    saved = variables.stored.get((stage + 1, value))
    terms: Terms = [] if saved is None else [(saved, 1.0)]
    for number in reading:
        delta = variables.chosen[stage, node, number]
        terms.append((delta, 1.0))
        if saved is not None:
            terms.append((_product(variables, delta, saved), -1.0))
    return terms, 0.0


def _product(variables: Variables, first: int, second: int) -> int:
    """Return a column for the product of two binaries (appendix C.4)."""
    builder = variables.builder
    if (first, second) in variables.products:
        return variables.products[first, second]
    product = variables.add_product(first, second)
    builder.row([(product, 1.0), (first, -1.0), (second, -1.0)], lower=-1.0)
    builder.row([(product, 1.0), (first, -1.0)], upper=0.0)
    builder.row([(product, 1.0), (second, -1.0)], upper=0.0)
    return product


def recomputation_memory(variables: Variables) -> None:
    """r (c_i + |x_i|) + |L^_k| + |S^(k-1)_i and L_i^k and D_k| + later s^k <= M (equation 12).

    Local values L_i^k count fully while the node is recomputed; needs `saved_memory` before it.
    """
    for (stage, node), recomputed in variables.recomputed.items():
        ways = variables.implementations.again[node]
        own = sum(variables.size(value) for value in ways[0].writes)
        terms: Terms = [(variables.held[stage, node], 1.0)]
        for value in variables.local(stage, node):
            after, sure = _afterwards(variables, stage, value)
            if not sure:
                own += variables.size(value)
                terms.extend((column, -factor * variables.size(value)) for column, factor in after)
        working, constant = _workspace(variables, stage, node, ways)
        terms += [*working, (recomputed, own + constant)]
        terms.extend(_taken_over(variables, stage, node))
        room = CAPACITY_UNITS - variables.gradients[stage]
        variables.builder.row(_merged(terms), upper=room, group=stage)


def backward_memory(variables: Variables) -> None:
    """c^_k + |y_k| + |L^_k| + |S^(k-1) and D_k| <= M (equations 2, 5 and 10)."""
    for stage in range(1, variables.backward + 1):
        node = variables.node_of(stage)
        ways = variables.implementations.first[node]
        constant = variables.gradients[stage]
        constant += sum(variables.size(value) for value in ways[0].writes)
        working, own = _workspace(variables, stage, node, ways)
        terms = [(variables.held[stage, variables.forward], 1.0), *working]
        variables.builder.row(terms, upper=CAPACITY_UNITS - (constant + own), group=stage)


def recomputed_inputs(variables: Variables) -> None:
    """r^k_i <= s^k_j + r^k_j for every input j of i (equation 7, left).

    p^k_j instead of r^k_j where j may be overwritten, by another node than i.
    """
    for (stage, node), column in variables.recomputed.items():
        for value in variables.inputs(variables.implementations.again[node][0]):
            sources = _sources(variables, stage, value)
            sources += [q for over, q in variables.overwriting(stage, node) if over == value]
            if column not in sources:
                variables.builder.row([(column, 1.0), *((c, -1.0) for c in sources)], upper=0.0)


def saved_has_a_source(variables: Variables) -> None:
    """s^(k-1)_i <= s^k_i + r^k_i: only existing values can be saved (equation 7, right)."""
    for (stage, value), column in variables.stored.items():
        if stage > 1 and not variables.is_forced(stage, value):
            sources = _sources(variables, stage - 1, value)
            variables.builder.row([(column, 1.0), *((c, -1.0) for c in sources)], upper=0.0)


def backward_inputs(variables: Variables) -> None:
    """s^k_i + r^k_i >= delta^_k,l for every forward value i that implementation l reads (8)."""
    for stage in range(1, variables.backward + 1):
        node = variables.node_of(stage)
        ways = variables.implementations.first[node]
        for number, way in enumerate(ways):
            delta = variables.chosen.get((stage, node, number))
            for value in variables.inputs(way):
                terms = [(c, 1.0) for c in _sources(variables, stage, value)]
                if delta is None:
                    variables.builder.row(terms, lower=1.0)
                else:
                    variables.builder.row([*terms, (delta, -1.0)], lower=0.0)


def _sources(variables: Variables, stage: int, value: ValueId) -> list[int]:
    """The columns that say where a value may be found in a stage: stored or recomputed."""
    stored = variables.problem.values[value]
    found = [variables.stored.get((stage, value))]
    if (stage, value) in variables.remaining:
        found.append(variables.remaining[stage, value])
    elif stored.producer is not None and stored.recoverable:
        found.append(variables.recomputed.get((stage, stored.producer)))
    return [column for column in found if column is not None]


def overwritten_is_gone(variables: Variables) -> None:
    """p^k_j >= r^k_j - sum q, p^k_j <= 1 - q^k_i and s^(k-1)_j <= 1 - q^k_i (equation 15).

    The first pass likewise: an overwritten value is not stored, and must not be read later.
    """
    for stage, node in [*((0, i) for i in range(variables.forward)), *variables.recomputed]:
        for value, column in variables.overwriting(stage, node):
            for gone in (
                variables.remaining.get((stage, value)),
                variables.stored.get((max(1, stage), value)),
            ):
                if gone is not None:
                    variables.builder.row([(gone, 1.0), (column, 1.0)], upper=1.0)
            if stage == 0 and value in variables.local(0, node + 1):
                variables.builder.row([(column, 1.0)], upper=0.0)
    for (stage, value), column in variables.remaining.items():
        made = variables.recomputed[stage, variables.producer(value)]
        taken = [(q, 1.0) for q in _overwriters(variables, stage, value)]
        variables.builder.row([(column, 1.0), (made, -1.0), *taken], lower=0.0)


def _overwriters(variables: Variables, stage: int, value: ValueId) -> list[int]:
    return [
        column
        for number, node in variables.recomputed
        if number == stage
        for overwritten, column in variables.overwriting(stage, node)
        if overwritten == value
    ]


def remaining_was_made(variables: Variables) -> None:
    """p^k_j <= r^k_j and q^k_i <= r^k_j (equation 16); q^k_i <= r^k_i is `one_implementation`."""
    for (stage, value), column in variables.remaining.items():
        made = variables.recomputed[stage, variables.producer(value)]
        for made_first in (column, *_overwriters(variables, stage, value)):
            variables.builder.row([(made_first, 1.0), (made, -1.0)], upper=0.0)
    for stage, node in variables.recomputed:
        for value, column in variables.overwriting(stage, node):
            if (stage, value) not in variables.remaining:
                variables.builder.row([(column, 1.0)], upper=0.0)


def one_implementation(variables: Variables) -> None:
    """sum_l delta_i,l = 1, sum_l delta^k_i,l = r^k_i, sum_l delta^_k,l = 1 (section 4)."""
    groups: dict[tuple[int, int], Terms] = {}
    for (stage, node, _), column in variables.chosen.items():
        groups.setdefault((stage, node), []).append((column, 1.0))
    for (stage, node), terms in groups.items():
        recomputed = variables.recomputed.get((stage, node))
        if recomputed is None:
            variables.builder.row(terms, lower=1.0, upper=1.0)
        else:
            variables.builder.row([*terms, (recomputed, -1.0)], lower=0.0, upper=0.0)


def boundary_memory(variables: Variables) -> None:
    """Where control returns to user code, its memory fits, too (not in the paper)."""
    for crossing in variables.problem.crossings:
        if not crossing.outside_bytes:
            continue
        constant = variables.units(crossing.outside_bytes)
        if crossing.stage < variables.forward:
            terms, held = _forward_held(variables, crossing.stage)
        else:
            stage = crossing.stage - variables.forward + 1
            held = -sum(variables.size(value) for value in crossing.tangents)
            held += variables.gradients[stage] if stage <= variables.backward else -held
            terms = [
                (variables.stored[stage, value], variables.size(value))
                for value in variables.forward_values
                if (stage, value) in variables.stored
            ]
        variables.builder.row(terms, upper=CAPACITY_UNITS - constant - held)


FAMILIES: tuple[Callable[[Variables], None], ...] = (
    forward_memory,
    saved_memory,
    recomputation_memory,
    backward_memory,
    recomputed_inputs,
    saved_has_a_source,
    backward_inputs,
    overwritten_is_gone,
    remaining_was_made,
    one_implementation,
    boundary_memory,
)
"""All constraint families, in an order in which each finds the columns of those before.

Rows of the memory of a backward stage are a group, added when a solution violates it.
"""
