"""Sweeps: each job once, restartable, on Dask workers the same rows."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from support.papers import chain
from support.searches import InterruptedAt
from tightfit.errors import BadInput
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.compare import ComparisonRow
from tightfit.planners.questions.sweep import Job, sweep


def jobs() -> list[Job]:
    graph = chain([2, 4, 1])
    return [
        Job(
            task=Task(graph=graph, budget_bytes=budget),
            planner=planner,
            limits=Limits(seconds=10, workers=1),
        )
        for budget in (9, 11)
        for planner in ("checkmate", "gist", "linearised_greedy")
    ]


def untimed(rows: tuple[ComparisonRow, ...]) -> list[ComparisonRow]:
    return [msgspec.structs.replace(row, seconds=0.0) for row in rows]


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        sweep(jobs(), tmp_path, progress=InterruptedAt(2))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(kept) == 2
    rows = sweep(jobs(), tmp_path)
    assert [row.planner for row in rows[:3]] == ["checkmate", "gist", "linearised_greedy"]
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    started = time.perf_counter()
    assert sweep(jobs(), tmp_path) == rows
    assert time.perf_counter() - started < 1.0


def test_a_job_is_known_by_its_content() -> None:
    first, *others = jobs()
    longer = msgspec.structs.replace(first, limits=Limits(seconds=11, workers=1))
    keys = {job.key() for job in (first, longer, *others)}
    assert len(keys) == len(others) + 2
    assert first.key() == jobs()[0].key()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_dask_workers_find_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    here = sweep(jobs(), tmp_path / "here")
    there = sweep(jobs(), tmp_path / "there", scheduler="local:2")
    assert untimed(there) == untimed(here)


def test_a_damaged_row_and_an_unreadable_scheduler_are_named(tmp_path: Path) -> None:
    sweep(jobs()[1:2], tmp_path)
    (row,) = tmp_path.iterdir()
    row.write_text("{")
    with pytest.raises(BadInput, match=r"delete it to run it again"):
        sweep(jobs()[1:2], tmp_path)
    with pytest.raises(BadInput, match="local:2 for two workers"):
        sweep(jobs(), tmp_path / "other", scheduler="local")
