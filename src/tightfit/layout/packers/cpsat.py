"""Layouts as a constraint program: rectangles in time and memory that do not overlap.

OR-Tools runs in a process of its own, since it cannot share one with every version of HiGHS.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import msgspec

from tightfit.errors import MissingExtra
from tightfit.layout.blocks import Block, largest_load
from tightfit.layout.packers.base import PackingLimits, Placement, core_packer
from tightfit.planners.child import run_in_child


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    blocks: tuple[Block, ...]
    start: tuple[int, ...]
    unit_bytes: int
    limits: PackingLimits


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    offsets: tuple[int, ...]
    bound_bytes: int


def pack_by_constraints(blocks: tuple[Block, ...], limits: PackingLimits) -> Placement:
    """Minimise the height with CP-SAT, starting from the portfolio's layout.

    Raises `MissingExtra` if OR-Tools is not installed.
    """
    if importlib.util.find_spec("ortools") is None:
        raise MissingExtra("packer 'cpsat' needs ortools: pip install tightfit[cpsat]")
    start = core_packer("portfolio")(blocks, limits).offsets
    unit_bytes = math.gcd(*(block.size_bytes for block in blocks))
    task = _Task(blocks=blocks, start=start, unit_bytes=unit_bytes, limits=limits)
    answers: list[_Answer] = []

    def receive(data: bytes) -> None:
        if data:
            answers.append(msgspec.msgpack.decode(data, type=_Answer))

    run_in_child(
        "tightfit.layout.packers.cpsat:serve",
        msgspec.msgpack.encode(task),
        seconds=limits.seconds * 1.1 + 2.0,
        on_report=receive,
    )
    if not answers:
        return Placement(start)
    return Placement(answers[-1].offsets, answers[-1].bound_bytes)


def serve(payload: bytes, report: Callable[[bytes], None]) -> None:
    """Solve the task of the parent process and report the best layout."""
    from ortools.sat.python import cp_model

    task = msgspec.msgpack.decode(payload, type=_Task)
    model: Any = cp_model.CpModel()
    lives: list[Any] = []
    places: list[Any] = []
    offsets: list[Any] = []
    most = sum(block.size_bytes for block in task.blocks) // task.unit_bytes
    least = largest_load(task.blocks) // task.unit_bytes
    height = model.new_int_var(least, most, "height")
    for block, start in zip(task.blocks, task.start, strict=True):
        size = block.size_bytes // task.unit_bytes
        offset = model.new_int_var(0, most - size, "")
        life = block.upper - block.lower
        lives.append(model.new_fixed_size_interval_var(block.lower, life, ""))
        places.append(model.new_fixed_size_interval_var(offset, size, ""))
        offsets.append(offset)
        model.add(offset + size <= height)
        model.add_hint(offset, start // task.unit_bytes)
    model.add_no_overlap_2d(lives, places)
    model.minimize(height)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = task.limits.seconds
    solver.parameters.random_seed = task.limits.seed
    solver.parameters.num_workers = 1
    if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = tuple(solver.value(offset) * task.unit_bytes for offset in offsets)
        bound = math.ceil(solver.best_objective_bound - 1e-6) * task.unit_bytes
        report(msgspec.msgpack.encode(_Answer(offsets=found, bound_bytes=bound)))
