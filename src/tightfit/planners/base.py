"""The interface of planners: functions of a task, limits and progress, with declared
capabilities."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Protocol

import msgspec

from tightfit.errors import MissingExtra
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Far, Gradients, Outcome
from tightfit.progress import Progress


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a planner stops."""

    seconds: float = 30.0  # wall time
    gap: float = 1e-4  # stop once overhead - bound is at most this (a fraction)
    # Search iterations; with it the result depends on the seed only, not on the machine
    iterations: int | None = None
    seed: int = 0  # seed of every random choice
    workers: int = 2  # threads or processes a planner may use
    solver: str = "highs"  # the solver of integer programs: ``"highs"`` or ``"gurobi"`` (extra)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One planning problem."""

    graph: Graph  # the step, validated
    budget_bytes: int  # constants included
    gradients: Gradients = "fresh"  # ``"fresh"`` or ``"accumulated"``
    # The user's budget, where others leave the step only this part of it
    whole_bytes: int | None = None
    part: float = 1.0  # left to it of each further byte
    # Whether first computations keep the graph's order: a program runs them, not the plan. The
    # default planner asks; planners that have one order keep it anyway.
    keeps_order: bool = False
    far: Far | None = None  # the far memory that values may be moved to


class Planner(Protocol):
    """A function from a task to an outcome whose plan is verified."""

    def __call__(self, task: Task, limits: Limits, progress: Progress) -> Outcome:
        """Return the best verified plan found within the limits, with a proven bound.

        ``KeyboardInterrupt`` during the call ends the search; the best plan so far is returned.
        """
        ...


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A planner and its capabilities; a mismatch with a task is an error, never a silent skip."""

    name: str
    function: str  # ``"module:function"``
    linear_only: bool = False  # it plans chains only
    # It chooses among operator alternatives; if not, it uses the defaults
    alternatives: bool = False
    exact: bool = False  # given time it proves optimality in its own search space
    # False for methods that propose plans without looking at the budget (Chen sqrt(n), Chen greedy
    # for every segment size). The plans are checked against the budget afterwards.
    looks_at_budget: bool = True
    # It can prove that no plan exists (for the given order of first computations)
    proves_infeasible: bool = False
    moves: bool = False  # it moves values to far memory where a task has some
    # The optional dependency it needs, as in ``pip install tightfit[extra]``
    extra: str | None = None
    options: tuple[str, ...] = ()  # variants of it, asked for as ``"name:option"``
    option: str = ""  # the variant that is asked for
    seeds_up_to: int = 0  # the default planner starts from its plans on graphs of so many ops

    def load(self) -> Planner:
        """Import the planner's function.

        Raises `MissingExtra` if an optional dependency is not installed.
        """
        module, _, attribute = self.function.partition(":")
        try:
            function = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            extra = self.extra
            if extra is None or (error.name or "").startswith("tightfit"):
                raise
            raise MissingExtra(
                f"planner {self.name!r} needs {error.name}: pip install tightfit[{extra}]"
            ) from error
        return partial(function, option=self.option) if self.option else function
