"""The bound with moves: the K-cut program with one cut, at which values may be away.

Further cuts were tried and raised no bound. The solution says also which values are best moved
(docs/search.md, "Far memory").
"""

from __future__ import annotations

import math

from tightfit._core import _engine
from tightfit.graph.ir import ValueId
from tightfit.planners.anytime.kcut.program import CutProgram, cut_program
from tightfit.planners.anytime.kcut.variables import Movable
from tightfit.planners.anytime.relaxation import relaxed
from tightfit.planners.base import Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.moves.gaps import movable_values
from tightfit.planners.solvers import Solution, SolveOptions, solve

_TOLERANCE = 1e-8  # a possible gain by the solver's feasibility tolerance
_GAP = 0.01  # of the objective, in percent


class MovesBound:
    """The bound, and the program that it comes from.

    `task`: with far memory, in the order that is searched.
    """

    def __init__(self, task: Task, solver: str) -> None:
        assert task.far is not None
        self.problem = build_problem(task)
        self.relaxed = relaxed(self.problem)
        self.solver = solver
        self.overhead = self.relaxed.trivial_bound
        self.source = "trivial"
        engine = self.problem.engine_values
        values = {engine[value]: value for value in movable_values(task.graph) if value in engine}
        self.values = values
        self.movable = Movable(task.far, frozenset(values))
        schedule = _engine.Schedule(self.problem.engine, self.problem.budget_bytes)
        self.cut = schedule.fullest_stage()

    @property
    def infeasible(self) -> bool:
        """Whether it is proven that no plan exists in this order."""
        return self.overhead == math.inf

    def away(self, margin: float, seconds: float, nodes: int | None) -> frozenset[ValueId] | None:
        """Return the values away at the cut in the best solution; None if there is none.

        `margin`: the share of the budget to leave free; 0: the solution's bound counts.
        """
        budget = int((1.0 - margin) * self.problem.budget_bytes)
        model = cut_program(self.relaxed, budget, (self.cut,), movable=self.movable)
        options = SolveOptions(seconds=seconds, gap=_GAP, nodes=nodes, solver=self.solver)
        solution = solve(model.program, options)
        if margin == 0.0:
            self._learn(model, solution)
        if solution.values is None:
            return None
        return frozenset(self.values[value] for value in model.away(solution))

    def _learn(self, model: CutProgram, solution: Solution) -> None:
        bound = math.inf
        if solution.status != "infeasible":
            bound = model.overhead(solution.bound) - _TOLERANCE
        if bound > self.overhead:
            self.overhead = bound
            self.source = "K-cut program with moves, 1 cut"
