"""From a solution of the K-cut program to a full schedule."""

from __future__ import annotations

from itertools import pairwise

from tightfit._core import _engine
from tightfit.planners.anytime.kcut.program import CutProgram
from tightfit.planners.solvers import Solution

Range = tuple[int, int, int]  # value, first stage, last stage


def complete(model: CutProgram, solution: Solution, schedule: _engine.Schedule) -> None:
    """Load the schedule that realises a solution (docs/search.md, "The K-cut program").

    In each window values are computed just in time and kept to the window's end; over the next cut
    only values that the solution has resident there survive. The engine frees values that are not
    read. The schedule may exceed the budget between the cuts.
    """
    schedule.keep_everything()
    chosen = model.chosen_alternatives(solution)
    for choice in model.variables.relaxed.problem.choices:
        fitting = max(choice, key=lambda branch: sum(chosen.get(op) == way for op, way in branch))
        chosen.update(dict(fitting))
    for op, way in chosen.items():
        schedule.select(op, way, -1, False)
    schedule.commit()
    schedule.load_ranges(_Completion(model, solution).ranges())


class _Completion:
    def __init__(self, model: CutProgram, solution: Solution) -> None:
        self.model = model
        self.variables = model.variables
        self.relaxed = model.variables.relaxed
        self.chosen = model.chosen_alternatives(solution)
        self.solution = solution
        self.since: dict[int, int] = {}  # value alive -> first stage at whose start it is
        self.last_read: dict[int, int] = {}  # value alive -> last stage so far that reads it
        self.closed: list[Range] = []
        self.again: dict[int, int] = {}  # alternatives of ops that run again in the window

    def ranges(self) -> list[Range]:
        """Residency of every value as ranges of stages."""
        bounds = [0, *self.variables.cuts, self.relaxed.ops]
        for window, (first, end) in enumerate(pairwise(bounds)):
            at_end: set[int] = set()
            self.again = self.model.chosen_again(self.solution, window - 1) if window else {}
            if window < len(self.variables.cuts):
                at_end = self.model.residents(self.solution, window)
            for stage in range(first, end):
                wanted = at_end if stage == end - 1 else set[int]()
                self._run(stage, wanted)
            for value in [v for v in self.since if v not in at_end]:
                self._close(value)
        return self.closed

    def _close(self, value: int) -> None:
        """End a value's residency with the last stage that reads it."""
        since, last = self.since.pop(value), self.last_read.pop(value, -1)
        if last >= since:
            self.closed.append((value, since, last))

    def _run(self, stage: int, wanted: set[int]) -> None:
        """Compute the stage's op and wanted values, with all they need."""
        producers = self.relaxed.problem.producers
        queue = [stage] if self._runs(stage) else []
        queue += [producers[v] for v in wanted if v not in self.since and producers[v] <= stage]
        seen: set[int] = set()
        while queue:
            op = queue.pop()
            if op in seen:
                continue
            seen.add(op)
            for value in self._reads(op, stage):
                self.last_read[value] = stage
                if value not in self.since:
                    queue.append(producers[value])
        for op in seen:
            for value in self._writes(op, stage):
                self.since.setdefault(value, stage + 1)

    def _runs(self, op: int) -> bool:
        """Whether an op runs in its own place: an optional one where the solution has it run."""
        if self.relaxed.problem.required[op]:
            return True
        columns = [self.variables.computed.get((k, op)) for k in range(len(self.variables.cuts))]
        columns.append(self.variables.made_before.get(op))
        values = self.solution.values
        assert values is not None
        return any(column is not None and values[column] > 0.5 for column in columns)

    def _reads(self, op: int, stage: int) -> tuple[int, ...]:
        if op < stage and op in self.again:
            way = self.relaxed.problem.alternatives[op][self.again[op]]
            return self.relaxed.reads_again(op, way)
        if op < stage:
            return self.relaxed.again_reads[op]
        if op in self.chosen:
            return self.relaxed.problem.alternatives[op][self.chosen[op]].reads
        return self.relaxed.first_reads[op]

    def _writes(self, op: int, stage: int) -> set[int]:
        ways = self.relaxed.problem.alternatives[op]
        return {v for way in ways if (way.first if op == stage else way.again) for v in way.writes}
