"""The interface to integer programming solvers: the same answers from each, limits, children."""

from __future__ import annotations

import importlib.util
import math
import time

import numpy as np
import pytest

from tightfit.errors import BadInput, MissingExtra
from tightfit.planners.solvers import SOLVERS, LinearProgram, ProgramBuilder, SolveOptions, solve
from tightfit.planners.solvers.program import from_bytes, to_bytes

MODULES = {"highs": "highspy", "gurobi": "gurobipy"}


@pytest.fixture(params=sorted(SOLVERS))
def solver(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(MODULES[request.param]) is None:
        pytest.skip(f"{MODULES[request.param]} is not installed")
    return request.param


def knapsack(capacity: float = 7.0) -> LinearProgram:
    """Values 10, 7, 4 at weights 5, 4, 3: with a capacity of 7 the last two win by 1."""
    builder = ProgramBuilder()
    columns = [builder.binary(cost=-value) for value in (10.0, 7.0, 4.0)]
    builder.row(zip(columns, (5.0, 4.0, 3.0), strict=True), upper=capacity)
    return builder.build()


def hard(items: int = 60) -> LinearProgram:
    """A market-split program, which branch and bound cannot finish in seconds."""
    generator = np.random.default_rng(1)
    builder = ProgramBuilder()
    columns = [builder.binary() for _ in range(items)]
    for _ in range(7):
        weights = generator.integers(1, 100, items).astype(float)
        miss = builder.real(lower=0.0, upper=1e4, cost=1.0)
        over = builder.real(lower=0.0, upper=1e4, cost=1.0)
        half = float(weights.sum() // 2)
        terms = [*zip(columns, weights, strict=True), (miss, 1.0), (over, -1.0)]
        builder.row(terms, lower=half, upper=half)
    return builder.build()


def test_each_solver_finds_the_optimum(solver: str) -> None:
    answer = solve(knapsack(), SolveOptions(seconds=10, solver=solver))
    assert (answer.status, answer.objective, answer.bound) == ("optimal", -11.0, -11.0)
    assert answer.values is not None and answer.values.tolist() == [0, 1, 1]


def test_each_solver_relaxes_and_its_value_is_a_bound(solver: str) -> None:
    answer = solve(knapsack(), SolveOptions(seconds=10, relax=True, solver=solver))
    assert answer.status == "optimal"
    assert answer.bound == pytest.approx(-13.5)


def test_each_solver_proves_infeasibility(solver: str) -> None:
    answer = solve(knapsack(-1.0), SolveOptions(seconds=10, solver=solver))
    assert (answer.status, answer.bound, answer.values) == ("infeasible", math.inf, None)


def test_each_solver_starts_from_a_given_solution(solver: str) -> None:
    start = np.array([1.0, 0.0, 0.0])
    answer = solve(knapsack(), SolveOptions(seconds=10, solver=solver), start=start)
    assert answer.started_from
    assert answer.objective == -11.0


def test_a_child_process_gives_the_same_answer(solver: str) -> None:
    answer = solve(knapsack(), SolveOptions(seconds=10, solver=solver), in_child=True)
    assert (answer.status, answer.objective, answer.bound) == ("optimal", -11.0, -11.0)


class Counting:
    """A progress that interrupts at the first update after `patience` seconds."""

    def __init__(self, patience: float) -> None:
        self.deadline = time.monotonic() + patience
        self.titles: list[str] = []

    def start(self, title: str, total: int | None = None, **limits: float | None) -> None:
        self.titles.append(title)

    def update(self, done: int, note: str = "") -> None:
        if time.monotonic() > self.deadline:
            raise KeyboardInterrupt

    def stop(self) -> None:
        pass


def test_an_interruption_returns_the_best_solution_and_bound() -> None:
    progress = Counting(patience=2.0)
    started = time.monotonic()
    answer = solve(hard(), SolveOptions(seconds=60), progress=progress, in_child=True)
    assert time.monotonic() - started < 10
    assert answer.status == "feasible"
    assert 0 <= answer.bound <= answer.objective < math.inf
    assert progress.titles == ["highs: 74 variables, 7 constraints"]


def test_a_time_limit_returns_the_best_solution_and_bound() -> None:
    answer = solve(hard(), SolveOptions(seconds=1.0))
    assert answer.status == "feasible"
    assert answer.bound <= answer.objective


def test_a_program_survives_the_way_to_another_process() -> None:
    program = knapsack()
    copy = from_bytes(to_bytes(program), LinearProgram)
    assert (copy.columns, copy.rows) == (3, 1)
    assert copy.coefficients.tolist() == program.coefficients.tolist()


def test_unknown_and_missing_solvers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"no solver is called 'cplex' \(known: gurobi, highs\)"):
        solve(knapsack(), SolveOptions(seconds=1, solver="cplex"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install tightfit\[gurobi\]"):
        solve(knapsack(), SolveOptions(seconds=1, solver="gurobi"))
