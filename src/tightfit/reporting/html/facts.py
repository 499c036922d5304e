"""The data of a page: columns by run of an op, by op and by stretch of memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from tightfit.graph.ir import Graph, OpId
from tightfit.plan.assemble import everything_kept
from tightfit.plan.lives import Life, lives_of
from tightfit.plan.plan import Compute, Enter, Plan
from tightfit.plan.simulate import Simulation, simulate


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The peaks of a measured step in bytes, constants included; the optimizer's step is after."""

    forward_bytes: int
    between_bytes: int
    backward_bytes: int
    after_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most the step held."""
        return max(self.forward_bytes, self.between_bytes, self.backward_bytes, self.after_bytes)


class BudgetPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Results for one budget, in bytes: the overhead of a plan, and the proven bound.

    Overheads are fractions of the step's cost; None: no plan, or nothing proven.
    """

    budget_bytes: int
    overhead: float | None
    bound: float | None
    status: str


class Phase(msgspec.Struct, frozen=True):
    """The runs from `first` to `last` that belong to one phase, and the peak measured there."""

    name: str
    first: int
    last: int
    measured_bytes: int | None


class Ops(msgspec.Struct, frozen=True):
    """Columns by op; its operator and its module are numbers of `Facts.strings`."""

    target: tuple[int, ...]
    module: tuple[int, ...]


class Runs(msgspec.Struct, frozen=True):
    """Columns by run: an op that is computed, the first time or again, or a border."""

    op: tuple[int, ...]  # the op; -1 - segment where a segment is entered
    again: tuple[int, ...]  # 1 where the op is computed again
    # The name of the alternative, a number of `Facts.strings`; -1 for the default
    way: tuple[int, ...]
    cost_s: tuple[float, ...]  # seconds of it
    # held_bytes, plain_bytes: held at its worst instant, and by a step that keeps everything while
    # it runs the latest of the ops up to here, in its own order
    held_bytes: tuple[int, ...]
    plain_bytes: tuple[int, ...]


class Lives(msgspec.Struct, frozen=True):
    """Columns by stretch of memory."""

    name: tuple[int, ...]  # a number of `Facts.strings`
    op: tuple[int, ...]  # the op that made it; -1 for memory of user code
    # first, last: the runs during which it is held
    first: tuple[int, ...]
    last: tuple[int, ...]
    size_bytes: tuple[int, ...]
    offset_bytes: tuple[int, ...]  # its first byte in an arena; empty where nothing is laid out


class StepBytes(msgspec.Struct, frozen=True):
    """The bytes that matter for the whole page, constants included."""

    budget_bytes: int
    peak_bytes: int
    constant_bytes: int
    plain_peak_bytes: int
    peak_run: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is drawn."""

    strings: tuple[str, ...]  # names; other columns hold their numbers
    held: StepBytes
    phases: tuple[Phase, ...]
    ops: Ops
    runs: Runs
    lives: Lives
    curve: tuple[BudgetPoint, ...]  # results for other budgets, this budget among them


class _Names:
    """Numbers for names, each name kept once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def all(self) -> tuple[str, ...]:
        """Return the names in the order of their numbers."""
        return tuple(self._numbers)


def facts_of(
    graph: Graph,
    plan: Plan,
    *,
    measured: Measured | None = None,
    offsets: Sequence[int] = (),
    curve: Sequence[BudgetPoint] = (),
) -> Facts:
    """Return the data of a page about a valid plan.

    `offsets`: in an arena, in bytes: one for each of `tightfit.plan.lives.lives_of`; or none.
    """
    names = _Names()
    result = simulate(graph, plan)
    everything = everything_kept(graph, plan.gradients)
    plain = simulate(graph, everything)
    numbered = [
        index for index, step in enumerate(plan.instructions) if isinstance(step, (Compute, Enter))
    ]
    lives = _lives(graph, lives_of(graph, plan), numbered, offsets, names)
    return Facts(
        held=StepBytes(
            budget_bytes=plan.budget_bytes,
            peak_bytes=result.peak_bytes,
            constant_bytes=graph.constant_bytes,
            plain_peak_bytes=plain.peak_bytes,
            peak_run=max(bisect_left(numbered, result.peak_index), 0),
        ),
        phases=_phases(graph, plan, numbered, measured),
        ops=Ops(
            tuple(names.number(op.target) for op in graph.ops),
            tuple(names.number(op.module) for op in graph.ops),
        ),
        runs=_runs(graph, plan, numbered, result, _held_first(everything, plain), names),
        lives=lives,
        curve=tuple(sorted(curve, key=lambda point: point.budget_bytes)),
        strings=names.all(),
    )


def _held_first(plan: Plan, result: Simulation) -> dict[OpId, tuple[int, int]]:
    """Return where each op runs first, and the bytes held at the worst instant of its run."""
    held: dict[OpId, tuple[int, int]] = {}
    for place, step in enumerate(plan.instructions):
        if isinstance(step, Compute):
            held.setdefault(step.op, (place, result.during_bytes[place]))
    return held


def _runs(
    graph: Graph,
    plan: Plan,
    numbered: Sequence[int],
    result: Simulation,
    held_plain: dict[OpId, tuple[int, int]],
    names: _Names,
) -> Runs:
    rows: list[tuple[int, int, int, float, int, int]] = []
    seen: set[OpId] = set()
    plain = (-1, graph.constant_bytes)
    for index in numbered:
        step = plan.instructions[index]
        if isinstance(step, Enter):
            rows.append((-1 - step.segment, 0, -1, 0.0, result.during_bytes[index], plain[1]))
        elif isinstance(step, Compute):
            again = step.op in seen
            plain = max(plain, held_plain.get(step.op, plain))  # a plan may put off an op
            seen.add(step.op)
            name = -1 if step.alternative == 0 else names.number(step.alternative_in(graph).name)
            cost_s = float(f"{step.cost_s(graph):.3g}")
            rows.append((step.op, int(again), name, cost_s, result.during_bytes[index], plain[1]))
    return Runs(*zip(*rows, strict=True)) if rows else Runs((), (), (), (), (), ())


def _lives(
    graph: Graph,
    lives: Sequence[Life],
    numbered: Sequence[int],
    offsets: Sequence[int],
    names: _Names,
) -> Lives:
    """Return the stretches of memory by run; those between two runs only are left out."""
    ticks = [2 * index for index in numbered]
    rows: list[tuple[int, int, int, int, int]] = []
    kept: list[int] = []
    for number, life in enumerate(lives):
        first, last = bisect_left(ticks, life.lower), bisect_left(ticks, life.upper) - 1
        if first > last:
            continue
        kept.append(number)
        name = names.number(_name_of(graph, life))
        rows.append((name, -1 if life.op is None else life.op, first, last, life.size_bytes))
    columns = tuple(zip(*rows, strict=True)) if rows else ((), (), (), (), ())
    return Lives(*columns, tuple(offsets[number] for number in kept) if offsets else ())


_OTHER_CONTENTS = {
    "second instance": "the same value once more, while it runs",
    "workspace": "workspace, needed while it runs",
    "random state": "random state",
    "outside": "held by code outside the plan",
}


def _name_of(graph: Graph, life: Life) -> str:
    if life.content == "value" and life.value is not None:
        return graph.values[life.value].name
    return _OTHER_CONTENTS[life.content]


def _phases(
    graph: Graph, plan: Plan, numbered: Sequence[int], measured: Measured | None
) -> tuple[Phase, ...]:
    """Return the stretches of runs that belong to forward and to backward."""
    steps = (plan.instructions[index] for index in numbered)
    entered = [(run, step.segment) for run, step in enumerate(steps) if isinstance(step, Enter)]
    ends = [*(run for run, _ in entered[1:]), len(numbered)]
    phases: list[Phase] = []
    for (first, segment), end in zip(entered, ends, strict=True):
        name = graph.segments[segment].phase
        peak = None
        if measured is not None:
            peak = measured.forward_bytes if name == "forward" else measured.backward_bytes
        phases.append(Phase(name, first, end - 1, peak))
    return tuple(phases)
