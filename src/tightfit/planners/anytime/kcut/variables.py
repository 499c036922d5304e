"""The variables of the K-cut program: values alive at the cuts, ops run between them.

Cut k is the first computation of op ``cuts[k]``; window k lasts from there to the next cut. An
optional op may run late or not at all: a cut there looks at values resident in its place only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tightfit.plan.plan import Far
from tightfit.planners.anytime.relaxation import RelaxedProblem
from tightfit.planners.solvers import ProgramBuilder

BUDGET_UNITS = 1000.0
"""The budget in the program's unit of memory."""

COST_UNITS = 100.0
"""The baseline in the program's unit of cost: percent."""

Allowed = Sequence[Collection[int] | None]
"""Per window the ops that may be computed again in it (None: all)."""

_PIECES = 8  # of the time before the cut, and after it
_LONGEST = 1e9  # wait, in the program's unit: no plan is ever as long

Columns = TypeVar("Columns")


@dataclass(frozen=True)
class Movable:
    """The values that may be moved, and the link."""

    far: Far  # far memory
    values: frozenset[int]  # values of the engine that may be away


@dataclass(frozen=True)
class MoveColumns:
    """The further columns of a program with far memory, which has one cut."""

    far: Far  # far memory
    # By value: it is in far memory only while the cut's op runs, and will be loaded
    away: Mapping[int, int]
    # The time of the step that no op accounts for, before the cut and after it: the op at whose
    # first computation a piece begins, and the column
    waits_before: tuple[tuple[int, int], ...]
    waits_after: tuple[tuple[int, int], ...]


def at_cut(columns: Mapping[tuple[int, int], Columns], k: int) -> list[tuple[int, Columns]]:
    """Return the entries of one cut or window, by the value, op or alternative that they are of."""
    return [(key, found) for (cut, key), found in columns.items() if cut == k]


class Variables:
    """The columns of the program; ops and values are the engine's. All but waits are binary.

    `budget_bytes`: the engine's budget (constants subtracted). `cuts`: ops of the engine,
    ascending. `allowed`: None: every op may be computed again in every window. `movable`: values
    that may be away at the one cut, in far memory. `resident` (dict of (cut, value) to column): the
    value is alive while the cut's op runs. `computed` (dict of (window, op) to column): the op runs
    in the window. `later` (dict of (cut, op) to column): the op runs at the cut or at any time
    after it; in the last window that is `computed`. `chosen` (dict of (op, alternative) to column):
    the first computation takes the alternative; only where alternatives read differently. For an
    optional op before the first cut it means that the op has run by this alternative. `branches`:
    for each of the linked choices: which branch is taken. `chosen_again` (dict of (window, op,
    alternative) to column): an op that runs again in the window does so by the alternative, at
    least once; only where alternatives read differently. `running` (dict of (cut, alternative) to
    list of (column, bytes)): how the cut's op runs, and the bytes of its results and workspace
    then. Only for a required op with several variants of which the cheaper need more bytes.
    `made_before`: an optional op before the first cut has run. `moving`: values away at the cut,
    and the time that no other column accounts for. `extra_costs` (list of (column, cost)): costs of
    all columns except `computed` and `moving`. `constant`: cost of the required first computations
    before the first cut.
    """

    def __init__(
        self,
        relaxed: RelaxedProblem,
        budget_bytes: int,
        cuts: Sequence[int],
        allowed: Allowed | None = None,
        movable: Movable | None = None,
    ) -> None:
        self.relaxed = relaxed
        self.budget_bytes = budget_bytes
        self.cuts = tuple(cuts)
        self.builder = ProgramBuilder()
        self.resident: dict[tuple[int, int], int] = {}
        self.computed: dict[tuple[int, int], int] = {}
        self.later: dict[tuple[int, int], int] = {}
        self.chosen: dict[tuple[int, int], int] = {}
        self.chosen_again: dict[tuple[int, int, int], int] = {}
        self.running: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.made_before: dict[int, int] = {}
        self.extra_costs: list[tuple[int, float]] = []
        self.branches = [[self.builder.binary() for _ in c] for c in relaxed.problem.choices]
        self._add_chosen()
        self._add_made_before()
        for k in range(len(self.cuts)):
            self._add_resident(k)
            self._add_running(k)
            self._add_computed(k, None if allowed is None else allowed[k])
            self._add_chosen_again(k)
        for k in range(len(self.cuts) - 1):
            self._add_later(k)
        self.moving = None if movable is None else self._moving(movable)
        self.constant = sum(
            self.cost(relaxed.first_cost[op])
            for op in range(self.cuts[0])
            if relaxed.problem.required[op]
        )

    def units(self, size_bytes: int) -> float:
        """Bytes in the program's unit."""
        return BUDGET_UNITS * size_bytes / max(1, self.budget_bytes)

    def cost(self, units: int) -> float:
        """A cost of the engine in the program's unit."""
        return COST_UNITS * units / max(1, self.relaxed.problem.baseline_cost)

    def window(self, k: int) -> tuple[int, int]:
        """First op of window k and the first op after it."""
        return self.cuts[k], self.cuts[k + 1] if k + 1 < len(self.cuts) else self.relaxed.ops

    def _add_chosen(self) -> None:
        relaxed = self.relaxed
        for op in range(relaxed.ops):
            if not relaxed.has_choice(op):
                continue
            for number, way in relaxed.first_alternatives(op):
                extra = way.cost - relaxed.first_cost[op]
                self.chosen[op, number] = self._extra(self.cost(extra))

    def _add_made_before(self) -> None:
        relaxed = self.relaxed
        for op in range(self.cuts[0]):
            if not relaxed.problem.required[op]:
                self.made_before[op] = self._extra(self.cost(relaxed.first_cost[op]))

    def _add_resident(self, k: int) -> None:
        """For values that exist at the cut and may be read after it; 1 if they must be there."""
        relaxed, cut = self.relaxed, self.cuts[k]
        needed = self._needed_at(cut)
        for value, producer in enumerate(relaxed.problem.producers):
            if producer >= cut:
                continue
            useful = relaxed.last_reader[value] >= cut or relaxed.recomputable[producer]
            if relaxed.kept(value, cut) or value in needed:
                self.resident[k, value] = self.builder.binary(lower=1.0)
            elif useful:
                self.resident[k, value] = self.builder.binary()

    def _moving(self, movable: Movable) -> MoveColumns:
        """Add waits, and that values are away that may be moved and that something reads later."""
        relaxed, (cut,) = self.relaxed, self.cuts
        before, after = self._waits(0, cut), self._waits(cut, relaxed.ops)
        away: dict[int, int] = {}
        for value in sorted(movable.values - self._needed_at(cut)):
            made = relaxed.problem.producers[value] < cut
            if made and relaxed.last_reader[value] >= cut and not relaxed.kept(value, cut):
                away[value] = self.builder.binary()
        return MoveColumns(movable.far, away, before, after)

    def _waits(self, first: int, end: int) -> tuple[tuple[int, int], ...]:
        """Add a wait for each piece of a stretch of the step."""
        starts = sorted({first + (end - first) * k // _PIECES for k in range(_PIECES)})
        add = self.builder.real
        return tuple((op, add(lower=0.0, upper=_LONGEST, cost=1.0)) for op in starts)

    def _needed_at(self, cut: int) -> set[int]:
        """The values that the first computation of a cut's op surely reads."""
        return set(self.relaxed.first_reads[cut]) if self.relaxed.problem.required[cut] else set()

    def _extra(self, cost: float) -> int:
        """Add a binary whose cost is time that `computed` does not account for."""
        column = self.builder.binary(cost=cost)
        self.extra_costs.append((column, cost))
        return column

    def _add_running(self, k: int) -> None:
        relaxed, cut = self.relaxed, self.cuts[k]
        ways = relaxed.running(cut)
        if not relaxed.problem.required[cut] or len(ways) < 2:
            return
        for number, cost, size in ways:
            least = relaxed.problem.alternatives[cut][number].cost
            known = least if relaxed.has_choice(cut) else relaxed.first_cost[cut]
            column = self._extra(self.cost(cost - known))
            self.running.setdefault((k, number), []).append((column, size))

    def _add_computed(self, k: int, allowed: Collection[int] | None) -> None:
        """1 for required first computations, free for possible recomputations."""
        relaxed = self.relaxed
        first, end = self.window(k)
        programs = self._programs(first, end)
        for op in range(end):
            if op >= first:
                cost = self.cost(relaxed.first_cost[op])
                lower = 1.0 if relaxed.problem.required[op] else 0.0
                self.computed[k, op] = self.builder.binary(lower=lower, cost=cost)
            elif relaxed.recomputable[op] and relaxed.problem.programs[op] in programs:
                cost = self.cost(relaxed.again_cost[op])
                upper = 1.0 if allowed is None or op in allowed else 0.0
                self.computed[k, op] = self.builder.binary(upper=upper, cost=cost)

    def _add_chosen_again(self, k: int) -> None:
        relaxed = self.relaxed
        for op in range(self.cuts[k]):
            if (k, op) not in self.computed or not relaxed.has_choice_again(op):
                continue
            for number, way in relaxed.again_alternatives(op):
                extra = self.cost(way.cost - relaxed.again_cost[op])
                self.chosen_again[k, op, number] = self._extra(extra)

    def _programs(self, first: int, end: int) -> set[int]:
        """The programs entered from op `first` to `end`, before which others may run again."""
        problem = self.relaxed.problem
        last = problem.segments[min(end, self.relaxed.ops - 1)]
        return {problem.segment_programs[s] for s in range(problem.segments[first], last + 1)}

    def _add_later(self, k: int) -> None:
        relaxed = self.relaxed
        for op in range(relaxed.ops):
            if op < self.cuts[k] and not relaxed.recomputable[op]:
                continue
            required = op >= self.cuts[k] and relaxed.problem.required[op]
            self.later[k, op] = self.builder.binary(lower=1.0 if required else 0.0)
