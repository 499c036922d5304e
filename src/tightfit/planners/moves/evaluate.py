"""Evaluation of a choice of moves: placed by the link, planned around, simulated."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np

from tightfit._core import _engine
from tightfit.graph.ir import ValueId
from tightfit.plan.assemble import Step, keep_everything, steps_of
from tightfit.plan.simulate import Simulation, simulate
from tightfit.planners.anytime.borrow import borrowed_ranges
from tightfit.planners.anytime.polish import MIXED, Job, polish
from tightfit.planners.anytime.pool import PooledSchedule
from tightfit.planners.anytime.search import Search
from tightfit.planners.anytime.strategy import run_search
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.problem import EngineProblem, computes_of
from tightfit.planners.moves.gaps import Gap, Shift, gaps_of, place, start_times
from tightfit.planners.moves.offer import MovesGraph, may_be_offered, offer_moves
from tightfit.planners.moves.tidy import tidy
from tightfit.planners.outcomes import plan_of
from tightfit.progress import Progress

_HOT = 1e-3  # of the short searches


@dataclass(frozen=True)
class Choice:
    """Which values may be moved, and how."""

    values: frozenset[ValueId]  # those that may be moved
    # How much longer than its ops the step is taken to be: above 1, it stalls for transfers
    pace: float = 1.0
    toll: float = 0.1  # assumed cost of a load, as a share of its time
    # Values that leave or come back at other places than the link asks for
    shifts: tuple[tuple[ValueId, Shift], ...] = ()


@dataclass(frozen=True)
class MovesPlan:
    """A plan within both budgets, as steps in the task's order, with its time and bytes."""

    choice: Choice
    steps: tuple[Step, ...]
    result: Simulation

    @property
    def time_s(self) -> float:
        """Seconds of the step, stalls included."""
        return self.result.time_s


class MovesEvaluator:
    """Plans around moves.

    `task`: with far memory; plans keep its order.
    """

    def __init__(self, task: Task) -> None:
        assert task.far is not None
        self.task = task
        self.far = task.far
        self.sizes = {value.id: value.size_bytes for value in task.graph.values}
        self.plain = start_times(task.graph, keep_everything(task.graph))
        gaps = gaps_of(task.graph, self.plain).items()
        ops = task.graph.ops
        self.gaps: Mapping[ValueId, Gap] = MappingProxyType(
            {value: gap for value, gap in gaps if may_be_offered(ops[gap.made])}
        )

    def evaluate(
        self, choice: Choice, start: Sequence[Step] | None, iterations: int, seed: int = 0
    ) -> MovesPlan | None:
        """Return a plan with these moves.

        `start`: a plan to start from, with other moves or none; its times place the moves. None: a
        step that keeps everything. `iterations`: of search around that, once it fits.
        """
        cut = self._cut(choice, start)
        problem = build_problem(self._task(cut))
        begun = None if start is None else _as_schedule(problem, cut, start)
        job = Job(begun, _HOT, MIXED, 0.0, iterations, seed, problem.baseline_cost)
        schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
        return self._found(choice, cut, problem, polish(problem, schedule, job))

    def search_around(
        self, choice: Choice, start: Sequence[Step] | None, limits: Limits, progress: Progress
    ) -> MovesPlan | None:
        """As `evaluator`, with all that the search without far memory can do."""
        cut = self._cut(choice, start)
        task = self._task(cut)
        problem = build_problem(task)
        search = Search(task, problem, limits, progress, time.perf_counter())
        if start is not None:
            search.pool.add_seed(_as_schedule(problem, cut, start))
            search.repair_seeds()
        try:
            run_search(search)
        except KeyboardInterrupt:
            if search.pool.best is None:
                raise
        return self._found(choice, cut, problem, search.pool.best)

    def _cut(self, choice: Choice, start: Sequence[Step] | None) -> MovesGraph:
        begins = self.plain if start is None else start_times(self.task.graph, start)
        gaps = [self.gaps[value] for value in choice.values]
        moves = place(gaps, self.far, self.sizes, begins, choice.pace, dict(choice.shifts))
        return offer_moves(self.task.graph, moves, self.far, choice.toll)

    def _task(self, cut: MovesGraph) -> Task:
        return msgspec.structs.replace(self.task, graph=cut.graph, far=None)

    def _found(
        self, choice: Choice, cut: MovesGraph, problem: EngineProblem, best: PooledSchedule | None
    ) -> MovesPlan | None:
        if best is None:
            return None
        schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
        best.load(schedule)
        graph = self.task.graph
        steps = cut.steps(computes_of(problem, schedule.computes()))
        plan = plan_of(self.task, steps)
        tidied = steps_of(graph, tidy(graph, plan))
        found = [
            MovesPlan(choice, tuple(each), simulate(graph, made))
            for each, made in ((steps, plan), (tidied, plan_of(self.task, tidied)))
        ]
        return min(filter(self._fits, found), key=lambda each: each.time_s, default=None)

    def _fits(self, found: MovesPlan) -> bool:
        near = found.result.peak_bytes <= self.task.budget_bytes
        return near and found.result.far_peak_bytes <= self.far.capacity_bytes


def _as_schedule(problem: EngineProblem, cut: MovesGraph, steps: Sequence[Step]) -> PooledSchedule:
    """Return steps of the graph without moves as a schedule of the engine; it may not fit."""
    computes = cut.computes(steps)
    rows = borrowed_ranges(problem, cut.graph, computes)
    ranges = np.array(rows, dtype=np.int32) if rows else np.zeros((0, 3), dtype=np.int32)
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    choices = schedule.first_choices()
    seen: set[int] = set()
    for step in computes:
        if step.op in seen:
            continue
        seen.add(step.op)
        way = step.alternative_in(cut.graph)
        reads = {problem.engine_values[v] for v in way.reads if v in problem.engine_values}
        writes = {problem.engine_values[v] for v in way.writes}
        position = problem.engine_ops[step.op]
        for number, own in enumerate(problem.alternatives[position]):
            if own.first and set(own.reads) == reads and set(own.writes) == writes:
                choices[position] = number
                break
    again = (-1,) * len(choices)
    return PooledSchedule(ranges, tuple(choices), again, 0, False)
