"""The constraint families of Checkmate's program, one function each.

Numbers refer to arXiv:1910.02653v3; where the paper has one value per node, a node here makes a
set of values.
"""

from __future__ import annotations

from collections.abc import Callable

from tightfit.graph.ir import ValueId
from tightfit.planners.papers.checkmate.variables import Variables
from tightfit.planners.papers.stages.scale import CAPACITY_UNITS


def inputs_are_there(variables: Variables) -> None:
    """R[t,j] <= R[t,i] + S[t,i] for every input i of j (equation 1b)."""
    for (stage, node), column in variables.computed.items():
        for value in variables.implementation(stage, node).reads:
            if variables.is_forced(stage, value):
                continue
            terms = [(column, 1.0)]
            resident = variables.resident.get((stage, value))
            source = variables.source(stage, value)
            terms.extend((c, -1.0) for c in (resident, source) if c is not None)
            variables.builder.row(terms, upper=0.0)


def residency_has_a_source(variables: Variables) -> None:
    """S[t,i] <= R[t-1,i] + S[t-1,i] (equation 1c); tangents appear at their segment's entry."""
    limits = variables.limits
    for (stage, value), column in variables.resident.items():
        stored = variables.problem.values[value]
        appears = stored.producer is None and limits[stage] == stored.begins
        if variables.is_forced(stage, value) or (
            appears and (stage == 0 or limits[stage - 1] < stored.begins)
        ):
            continue
        terms = [(column, 1.0)]
        before = variables.resident.get((stage - 1, value))
        source = variables.source(stage - 1, value)
        terms.extend((c, -1.0) for c in (before, source) if c is not None)
        variables.builder.row(terms, upper=0.0)


def used_memory(variables: Variables) -> None:
    """U[t,0] = sum M_i S[t,i] + M_0 R[t,0] (2); U[t,k+1] = U[t,k] - freed + M_k+1 R[t,k+1] (3).

    Constants are in the capacity.
    """
    units = variables.units
    sizes = {v: units(s.size_bytes) for v, s in variables.problem.values.items() if s.size_bytes}
    at_start: dict[int, list[tuple[int, float]]] = {}
    for (stage, value), column in variables.resident.items():
        if value in sizes:
            at_start.setdefault(stage, []).append((column, -sizes[value]))
    for stage, nodes in enumerate(variables.nodes):
        carried = at_start.get(stage, [])
        for node in nodes:
            way = variables.implementation(stage, node)
            made = sum(sizes.get(value, 0.0) for value in way.writes)
            used = variables.used[stage, node]
            computed = variables.computed[stage, node]
            terms = [(used, 1.0), *carried, (computed, -made)]
            variables.builder.row(terms, lower=0.0, upper=0.0, group=stage)
            carried = [(used, -1.0)]
            for value in dict.fromkeys((*way.reads, *way.writes)):
                if (stage, value, node) in variables.freed:
                    carried.append((variables.freed[stage, value, node], sizes[value]))


def workspace(variables: Variables) -> None:
    """U[t,k] + W_k R[t,k] <= budget: memory of a node while it runs (not in the paper)."""
    for (stage, node), used in variables.used.items():
        needed = variables.units(variables.implementation(stage, node).workspace_bytes)
        if needed:
            terms = [(used, 1.0), (variables.computed[stage, node], needed)]
            variables.builder.row(terms, upper=CAPACITY_UNITS, group=stage)


def free_if_safe(variables: Variables) -> None:
    """1 - FREE[t,i,k] <= hazards[t,i,k] (equation 6b): values that can be freed are freed."""
    for (stage, value, node), free in variables.freed.items():
        hazards = variables.hazards(stage, value, node)
        computed = variables.computed[stage, node]
        terms = [(computed, 1.0), (free, -1.0), *((c, -1.0) for c in hazards)]
        variables.builder.row(terms, upper=0.0, group=stage)


def free_only_if_safe(variables: Variables) -> None:
    """kappa (1 - FREE[t,i,k]) >= hazards[t,i,k] (equation 6c), hazard by hazard.

    kappa is the number of hazards; rows of their own are the same for binaries and a tighter
    relaxation. The first hazard is FREE[t,i,k] <= R[t,k]. For the others all frees of a stage are
    in one row. Values before less values freed are those that a later node j or the next stage
    finds: R[t,j] + sum_{k<j} FREE[t,i,k] <= S[t,i] + R[t,i], and the same with S[t+1,i] for R[t,j].
    Where a node writes a value that is resident, the right side is 2: the second instance goes.
    """
    for (stage, _, node), free in variables.freed.items():
        terms = [(free, 1.0), (variables.computed[stage, node], -1.0)]
        variables.builder.row(terms, upper=0.0, group=stage)
    for stage, values in enumerate(variables.frees):
        for value, gone in values.items():
            there = (variables.resident.get((stage, value)), variables.writer(stage, value))
            found = [(column, -1.0) for column in there if column is not None]
            for reader, column in _later_readers(variables, stage, value):
                terms = [(free, 1.0) for node, free in gone if node < reader]
                if terms:
                    terms = [*terms, (column, 1.0), *found]
                    variables.builder.row(terms, upper=0.0, group=stage)


def _later_readers(variables: Variables, stage: int, value: ValueId) -> list[tuple[int, int]]:
    """The nodes that may read a value in a stage with their R, and S of the next stage."""
    readers = variables.readers[stage].get(value, ())
    found = [(reader, variables.computed[stage, reader]) for reader in readers]
    following = variables.resident.get((stage + 1, value))
    return found if following is None else [*found, (len(variables.problem.nodes), following)]


def boundary_memory(variables: Variables) -> None:
    """sum M_i S[t,i] + outside <= budget where control returns to user code (not in the paper)."""
    for crossing in variables.problem.crossings:
        if not crossing.outside_bytes:
            continue
        stage = variables.limits.index(crossing.stage)
        terms = [
            (variables.resident[stage, value], variables.units(stored.size_bytes))
            for value, stored in variables.problem.values.items()
            if (stage, value) in variables.resident and value not in crossing.tangents
        ]
        room = CAPACITY_UNITS - variables.units(crossing.outside_bytes)
        variables.builder.row(terms, upper=room)


FAMILIES: tuple[Callable[[Variables], None], ...] = (
    inputs_are_there,
    residency_has_a_source,
    used_memory,
    workspace,
    free_if_safe,
    free_only_if_safe,
    boundary_memory,
)
"""All constraint families; equations 1d to 1f and U <= budget are bounds of the variables.

Rows of the memory of a stage are a group, which is added when a solution violates it.
"""
