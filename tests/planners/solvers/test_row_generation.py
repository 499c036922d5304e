"""Programs whose memory rows are added as they are violated have the whole program's optimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from support.papers import chain, tasks
from tightfit.planners.base import Task
from tightfit.planners.papers.checkmate.program import build_program as build_checkmate
from tightfit.planners.papers.checkmate.variables import frontier_stages, split_stages
from tightfit.planners.papers.monet.implementations import single_implementations
from tightfit.planners.papers.monet.program import build_program as build_monet
from tightfit.planners.papers.stages.staged import staged
from tightfit.planners.solvers import SolveOptions, solve, solve_by_rows
from tightfit.planners.solvers.row_generation import violated_groups

OPTIONS = SolveOptions(seconds=20)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(tasks(most_nodes=7))
def test_adding_rows_as_they_are_violated_finds_the_optimum_of_the_whole_program(
    task: Task,
) -> None:
    problem = staged(task)
    for model in (
        build_checkmate(problem, frontier_stages(problem)),
        build_checkmate(problem, split_stages(problem)),
        build_monet(problem, single_implementations(problem)),
    ):
        whole = solve(model.program, OPTIONS)
        grown = solve_by_rows(model.program, OPTIONS, model.settled)
        assert grown.status == whole.status
        assert grown.objective == pytest.approx(whole.objective, abs=1e-5)
        if grown.values is not None:
            assert violated_groups(model.program, grown.values) == []


def test_only_the_stages_that_need_too_much_are_violated() -> None:
    """Keeping everything of a chain needs most when its backward pass begins."""
    problem = staged(Task(graph=chain([2, 4, 1]), budget_bytes=9))
    model = build_checkmate(problem, frontier_stages(problem))
    everything = model.settled(np.array(model.program.lower))
    assert violated_groups(model.program, everything) == [4]
    assert model.program.only([4]).rows < model.program.rows
