"""The K-cut program (planning.md, section 4): memory is looked at only when K chosen ops run.

Every schedule satisfies it, whatever its number of recomputations, so its optimum is a lower
bound on the cost for the given order of first computations; its solution is a good seed.

Cut k is the first computation of op ``cuts[k]``; window k lasts from there to the next cut. Binary
variables: ``resident[k, v]``: value v is alive while op ``cuts[k]`` runs; ``computed[k, j]``: op j
runs in window k; ``later[k, j]``: op j runs from cut k on; ``way[j, a]``: op j takes alternative a.
An optional op may run late or not at all: a cut there looks at what is resident in its place only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tightfit.planners.anytime.relaxation import Outline
from tightfit.planners.solvers import LinearProgram, ProgramBuilder, Solution, grains, within_reach

__all__ = ["CutProgram", "cut_program"]

BUDGET_UNITS = 1000.0  # the budget in the program's units of bytes
COST_UNITS = 100.0  # the baseline in the program's units of cost

_Terms = list[tuple[int, float]]


@dataclass
class CutProgram:
    """A K-cut program and the meaning of its columns."""

    outline: Outline
    cuts: tuple[int, ...]
    budget_bytes: int
    builder: ProgramBuilder = field(default_factory=ProgramBuilder)
    resident: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    computed: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    later: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    way: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    constant: float = 0.0

    @property
    def program(self) -> LinearProgram:
        """The program as arrays, its memory rows lowered to what sums of sizes can reach."""
        problem, rewritable = self.outline.problem, self.outline.rewritable
        sizes = [size for value, size in enumerate(problem.sizes) if rewritable[value]]
        found = [self.units(grain) for grain in grains(sizes, self.budget_bytes)]
        return within_reach(self.builder.build(), found)

    def units(self, size_bytes: int) -> float:
        """Bytes in the program's unit."""
        return BUDGET_UNITS * size_bytes / max(1, self.budget_bytes)

    def window(self, k: int) -> tuple[int, int]:
        """First op of window k and the first op after it."""
        return self.cuts[k], self.cuts[k + 1] if k + 1 < len(self.cuts) else self.outline.ops

    def overhead(self, objective: float) -> float:
        """Turn an objective or a bound on it into an overhead (a fraction)."""
        return (objective + self.constant) / COST_UNITS - 1.0

    def chosen_alternatives(self, solution: Solution) -> dict[int, int]:
        """The alternatives of first computations in a solution."""
        assert solution.values is not None
        return {op: way for (op, way), column in self.way.items() if solution.values[column] > 0.5}

    def residents(self, solution: Solution, k: int) -> set[int]:
        """The values alive at cut k in a solution."""
        assert solution.values is not None
        values = solution.values
        return {
            v for (cut, v), column in self.resident.items() if cut == k and values[column] > 0.5
        }


def cut_program(
    outline: Outline,
    budget_bytes: int,
    cuts: Sequence[int],
    *,
    allowed: Sequence[Collection[int] | None] | None = None,
) -> CutProgram:
    """Return the program with the given cuts.

    Parameters
    ----------
    budget_bytes : int
        The engine's budget (constants subtracted).
    cuts : sequence of int
        Ops of the engine, ascending.
    allowed : sequence of (collection of int or None), or None
        Per window the ops that may be computed again in it (None: all); a restriction makes
        the optimum no bound, but a good seed of large graphs.
    """
    model = CutProgram(outline, tuple(cuts), budget_bytes)
    _ways(model)
    for k in range(len(model.cuts)):
        _residents(model, k)
        _computations(model, k, None if allowed is None else allowed[k])
    for k in range(len(model.cuts)):
        _later_computations(model, k)
    _constant(model)
    for k in range(len(model.cuts)):
        _memory_row(model, k)
        _cut_op_rows(model, k)
        _origin_rows(model, k)
        _input_rows(model, k)
        _later_rows(model, k)
    return model


# ---------------------------------------------------------------------------- variables


def _cost(model: CutProgram, units: int) -> float:
    return COST_UNITS * units / max(1, model.outline.problem.baseline_cost)


def _ways(model: CutProgram) -> None:
    """way[j, a], one of them 1, for ops from the first cut on whose ways read differently."""
    outline = model.outline
    for op in range(model.cuts[0], outline.ops):
        if not outline.has_choice(op):
            continue
        for number, way in outline.first_alternatives(op):
            extra = way.cost - outline.first_cost[op]
            model.way[op, number] = model.builder.binary(cost=_cost(model, extra))


def _residents(model: CutProgram, k: int) -> None:
    """resident[k, v] for values that exist at the cut and may be read after it."""
    outline, cut = model.outline, model.cuts[k]
    producers = outline.problem.producers
    needed = set(outline.first_reads[cut]) if outline.problem.required[cut] else set[int]()
    for value, producer in enumerate(producers):
        if producer >= cut:
            continue
        useful = outline.last_reader[value] >= cut or outline.recomputable[producer]
        if outline.kept(value, cut) or value in needed:
            model.resident[k, value] = model.builder.binary(lower=1.0)
        elif useful:
            model.resident[k, value] = model.builder.binary()


def _computations(model: CutProgram, k: int, allowed: Collection[int] | None) -> None:
    """computed[k, j]: 1 for required first computations, free for possible recomputations."""
    outline = model.outline
    first, end = model.window(k)
    programs = _programs(outline, first, end)
    for op in range(end):
        if op >= first:
            cost = _cost(model, outline.first_cost[op])
            lower = 1.0 if outline.problem.required[op] else 0.0
            model.computed[k, op] = model.builder.binary(lower=lower, cost=cost)
        elif outline.recomputable[op] and outline.problem.programs[op] in programs:
            cost = _cost(model, outline.again_cost[op])
            upper = 1.0 if allowed is None or op in allowed else 0.0
            model.computed[k, op] = model.builder.binary(upper=upper, cost=cost)


def _programs(outline: Outline, first: int, end: int) -> set[int]:
    """The programs that are entered from op `first` to `end`, before which others may run again."""
    segments = outline.problem.segments
    last = segments[min(end, outline.ops - 1)]
    return {outline.problem.segment_programs[s] for s in range(segments[first], last + 1)}


def _later_computations(model: CutProgram, k: int) -> None:
    """later[k, j]; in the last window the same as computed[k, j]."""
    outline = model.outline
    if k == len(model.cuts) - 1:
        return
    for op in range(outline.ops):
        if op < model.cuts[k] and not outline.recomputable[op]:
            continue
        required = op >= model.cuts[k] and outline.problem.required[op]
        model.later[k, op] = model.builder.binary(lower=1.0 if required else 0.0)


def _constant(model: CutProgram) -> None:
    """The cost of required first computations before the first cut."""
    outline = model.outline
    model.constant = sum(
        _cost(model, outline.first_cost[op])
        for op in range(model.cuts[0])
        if outline.problem.required[op]
    )


# ---------------------------------------------------------------------------- constraints


def _memory_row(model: CutProgram, k: int) -> None:
    """What is alive while the cut's op runs fits the budget."""
    outline, cut = model.outline, model.cuts[k]
    terms = [
        (column, model.units(outline.problem.sizes[value]))
        for (at, value), column in model.resident.items()
        if at == k
    ]
    running = outline.running_bytes[cut] if outline.problem.required[cut] else 0
    room = model.budget_bytes - running
    model.builder.row(terms, upper=model.units(room))


def _reading(model: CutProgram, op: int, value: int) -> _Terms:
    """The ways of a first computation that read a value."""
    return [
        (model.way[op, number], 1.0)
        for number, way in model.outline.first_alternatives(op)
        if value in way.reads
    ]


def _choice_reads(model: CutProgram, op: int) -> list[int]:
    """Values that some but not all ways of a first computation read."""
    common = set(model.outline.first_reads[op])
    ways = model.outline.first_alternatives(op)
    return sorted({v for _, way in ways for v in way.reads} - common)


def _cut_op_rows(model: CutProgram, k: int) -> None:
    """The ways of an op that is chosen or runs; what the cut's own way reads is resident."""
    cut = model.cuts[k]
    first, end = model.window(k)
    for op in range(first, end):
        if not model.outline.has_choice(op):
            continue
        terms = [(model.way[op, n], 1.0) for n, _ in model.outline.first_alternatives(op)]
        model.builder.row([*terms, (model.computed[k, op], -1.0)], lower=0.0, upper=0.0)
    if model.outline.has_choice(cut) and model.outline.problem.required[cut]:
        for value in _choice_reads(model, cut):
            terms = _reading(model, cut, value)
            model.builder.row([*terms, (model.resident[k, value], -1.0)], upper=0.0)


def _origin_rows(model: CutProgram, k: int) -> None:
    """What is resident at a cut was resident at the cut before, or computed in between."""
    if k == 0:
        return
    outline, previous = model.outline, model.cuts[k - 1]
    for (at, value), column in list(model.resident.items()):
        if at != k:
            continue
        producer = outline.problem.producers[value]
        if producer >= previous and outline.problem.required[producer]:
            continue
        terms = [(column, 1.0)]
        if (k - 1, value) in model.resident:
            terms.append((model.resident[k - 1, value], -1.0))
        made = (k - 1, producer) in model.computed
        if made and (producer >= previous or outline.rewritable[value]):
            terms.append((model.computed[k - 1, producer], -1.0))
        model.builder.row(terms, upper=0.0)


def _sources(model: CutProgram, k: int, value: int) -> _Terms | None:
    """Where window k may take a value from; None if it certainly has it."""
    outline, cut = model.outline, model.cuts[k]
    producer = outline.problem.producers[value]
    if producer >= cut and outline.problem.required[producer]:
        return None
    terms: _Terms = []
    if (k, value) in model.resident:
        terms.append((model.resident[k, value], -1.0))
    if (k, producer) in model.computed and (producer >= cut or outline.rewritable[value]):
        terms.append((model.computed[k, producer], -1.0))
    return terms


def _input_rows(model: CutProgram, k: int) -> None:
    """Whatever runs in a window has its inputs: resident at the cut or computed in the window."""
    outline = model.outline
    first, end = model.window(k)
    for op in range(end):
        if (k, op) not in model.computed:
            continue
        reads = outline.first_reads[op] if op >= first else outline.again_reads[op]
        for value in reads:
            sources = _sources(model, k, value)
            if sources is not None:
                model.builder.row([(model.computed[k, op], 1.0), *sources], upper=0.0)
        if op >= first and outline.has_choice(op):
            for value in _choice_reads(model, op):
                sources = _sources(model, k, value)
                if sources is not None:
                    model.builder.row([*_reading(model, op, value), *sources], upper=0.0)


def _later_rows(model: CutProgram, k: int) -> None:
    """The one-cut program of every cut, tying the windows together; tightens the relaxation."""
    if k == len(model.cuts) - 1:
        return
    outline, cut = model.outline, model.cuts[k]
    following = model.computed if k + 1 == len(model.cuts) - 1 else model.later
    for op in range(outline.ops):
        if (k, op) not in model.later:
            continue
        column = model.later[k, op]
        if op < cut:
            terms = [(column, 1.0)]
            if (k, op) in model.computed:
                terms.append((model.computed[k, op], -1.0))
            if (k + 1, op) in following:
                terms.append((following[k + 1, op], -1.0))
            model.builder.row(terms, upper=0.0)
        reads = outline.first_reads[op] if op >= cut else outline.again_reads[op]
        for value in reads:
            _later_input_row(model, k, value, [(column, 1.0)])
        if op >= cut and outline.has_choice(op):
            for value in _choice_reads(model, op):
                _later_input_row(model, k, value, _reading(model, op, value))


def _later_input_row(model: CutProgram, k: int, value: int, readers: _Terms) -> None:
    """An op that runs after the cut reads what is resident there or computed after it."""
    producer = model.outline.problem.producers[value]
    if producer >= model.cuts[k]:
        return
    terms = list(readers)
    if (k, value) in model.resident:
        terms.append((model.resident[k, value], -1.0))
    if (k, producer) in model.later and model.outline.rewritable[value]:
        terms.append((model.later[k, producer], -1.0))
    model.builder.row(terms, upper=0.0)
