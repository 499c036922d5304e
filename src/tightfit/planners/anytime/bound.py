"""Cutting planes: K-cut programs with one more cut each, until the gap is closed.

Each program's bound holds for every schedule. Its solution, completed, is simulated by the engine,
and the stage that exceeds the budget most becomes the next cut (docs/search.md, "Cutting planes").
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from tightfit._core import _engine
from tightfit.planners.anytime.kcut.complete import complete
from tightfit.planners.anytime.kcut.program import CutProgram, cut_program
from tightfit.planners.anytime.pool import Pool, PooledSchedule
from tightfit.planners.anytime.relaxation import RelaxedProblem
from tightfit.planners.solvers import Solution, SolveOptions, solve
from tightfit.progress import StoppableProgress

_FINEST_GAP, _COARSEST_GAP = 0.002, 0.1  # of the program's objective, in percent
_GAP_SHARE = 0.3  # of the open gap between plan and bound that a program may leave
_ROUND_S = 8.0  # per program; then its best solution gives the next cut
_MOST_DENSE_OPS = 64  # of graphs whose second program cuts at every stage: it is then exact
_TOLERANCE = 1e-8  # a possible gain by the solver's feasibility tolerance
_BUILD_S = 5e-5  # per op and cut, to put a program together
_DEAREST = 1.6  # completions above this many times the baseline are no seeds


class CutLoop:
    """Solves programs with more and more cuts and feeds a pool with bounds, seeds and plans.

    `pool`: where results go.
    """

    def __init__(self, relaxed: RelaxedProblem, pool: Pool, solver: str) -> None:
        self.relaxed = relaxed
        self.pool = pool
        self.solver = solver
        self.problem = relaxed.problem
        self.schedule = _engine.Schedule(self.problem.engine, self.problem.budget_bytes)
        self.cuts: tuple[int, ...] = (self.schedule.fullest_stage(),)
        self.finished = False
        self.exact = False  # solve the present cuts as exactly as it gets: there is no next program
        self.stop_event = threading.Event()

    def seed(self, margin: float, seconds: float, nodes: int | None = None) -> None:
        """Solve the one-cut program with part of the budget left free, for a seed only."""
        budget = int((1.0 - margin) * self.problem.budget_bytes)
        model = cut_program(self.relaxed, budget, self.cuts[:1])
        solution = self.solve(model, seconds, nodes, self._gap(), in_child=False)
        if solution.values is not None:
            complete(model, solution, self.schedule)
            self.pool.add_seed(PooledSchedule.of(self.schedule))

    def round(self, seconds: float, nodes: int | None = None, *, in_child: bool = False) -> None:
        """Solve the program with the present cuts, report, and choose the next cut."""
        model = cut_program(self.relaxed, self.problem.budget_bytes, self.cuts)
        solution = self.solve(model, seconds, nodes, self._gap(), in_child=in_child)
        if solution.status == "infeasible":
            self.pool.raise_bound(math.inf, self.source)
            self.finished = True
            return
        if solution.bound > -math.inf:
            self.pool.raise_bound(model.overhead(solution.bound) - _TOLERANCE, self.source)
        if solution.values is None or not self._take(model, solution):
            self.finished = self.exact
            self.exact = True

    @property
    def build_s(self) -> float:
        """About how long it takes to put the next program together."""
        return _BUILD_S * self.relaxed.ops * len(self.cuts)

    @property
    def source(self) -> str:
        """Where the bound comes from, for people."""
        return f"K-cut program, {len(self.cuts)} cut" + ("s" if len(self.cuts) > 1 else "")

    def solve(
        self, model: CutProgram, seconds: float, nodes: int | None, gap: float, *, in_child: bool
    ) -> Solution:
        """Solve a program to a gap in percent of the baseline, until the loop is stopped."""
        options = SolveOptions(seconds=seconds, gap=gap, nodes=nodes, solver=self.solver)
        progress = StoppableProgress(self.stop_event)
        return solve(model.program, options, progress=progress, in_child=in_child)

    def _gap(self) -> float:
        """How exactly to solve: early programs are only steps to better cuts."""
        pool = self.pool
        if pool.best is None or self.exact:
            return _FINEST_GAP
        open_percent = 100.0 * (pool.overhead - pool.bound)
        return min(_COARSEST_GAP, max(_FINEST_GAP, _GAP_SHARE * open_percent))

    def _take(self, model: CutProgram, solution: Solution) -> bool:
        """Complete and judge a solution; return whether there is a next cut."""
        complete(model, solution, self.schedule)
        found = PooledSchedule.of(self.schedule)
        if found.fits:
            self.pool.add(found)
        if found.cost < _DEAREST * self.problem.baseline_cost:
            self.pool.add_seed(found)
        peaks = self._peaks()
        budget = self.problem.budget_bytes
        over = sorted((t for t, peak in enumerate(peaks) if peak > budget), key=lambda t: -peaks[t])
        new = next((t for t in over if t not in self.cuts), None)
        if self.relaxed.ops <= _MOST_DENSE_OPS and not self.exact:
            self.cuts = tuple(range(1, self.relaxed.ops))
            self.exact = True
            return True
        if new is None:
            return False
        self.cuts = tuple(sorted((*self.cuts, new)))
        return True

    def _peaks(self) -> list[int]:
        """The bytes of each stage, were every op to run as fast as it can."""
        self.schedule.set_fastest(True)
        peaks = self.schedule.peaks()
        self.schedule.set_fastest(False)
        return peaks


class BoundWorker:
    """Runs cut loops in a thread next to the search; programs are solved in a child process.

    `loops`: run one after the other, each until its time (of `time.perf_counter`) or its end.
    """

    def __init__(self, loops: Sequence[tuple[CutLoop, float]]) -> None:
        self.loops = loops
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BoundWorker:
        self.thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        for loop, _ in self.loops:
            loop.stop_event.set()
        self.thread.join()
        if self.error is not None and details[0] is None:
            raise self.error

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def _run(self) -> None:
        try:
            for loop, deadline in self.loops:
                self._run_loop(loop, deadline)
        except BaseException as error:
            self.error = error

    @staticmethod
    def _run_loop(loop: CutLoop, deadline: float) -> None:
        while not (loop.finished or loop.pool.done or loop.stop_event.is_set()):
            left = deadline - time.perf_counter()
            if left < max(0.3, 2 * loop.build_s):
                return
            loop.round(left if loop.exact else min(left, _ROUND_S), in_child=True)
