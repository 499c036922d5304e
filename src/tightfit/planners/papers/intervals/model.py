"""The constraint model of retention intervals; runs in a child process (see `planner`).

Events are numbered stage by stage: one for the entry of stage t, then one for each node up to t.
An instance of a value is retained from the event that computes it to after its last reader.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from ortools.sat.python import cp_model

from tightfit.graph.ir import ValueId
from tightfit.plan.plan import Compute
from tightfit.planners.papers.intervals.planner import IntervalReport, IntervalTask
from tightfit.planners.papers.stages.schedule import last_uses, useful_until
from tightfit.planners.papers.stages.staged import Implementation, Staged

_COST_UNITS = 10**7
"""The cost of a step without recomputation in the model's unit; costs are rounded down."""

_RETENTIONS = (2, 3, 4)
"""Intervals per value (the paper's C): more are tried only where fewer are proven too few."""

Report = Callable[[bytes], None]


def entry_event(stage: int) -> int:
    return stage * (stage + 3) // 2


def node_event(stage: int, node: int) -> int:
    return entry_event(stage) + 1 + node


@dataclass(frozen=True)
class Instance:
    """One computation of a node that may happen: when, and whether it does."""

    way: Implementation
    start: Any
    active: Any


@dataclass(frozen=True)
class Retention:
    """One instance of a value: the op that computes it and until when it stays."""

    instance: Instance | None
    start: Any
    end: Any


class IntervalModel:
    """Variables and constraints of the model, one short method each.

    `retentions`: the most intervals per value.
    """

    def __init__(self, problem: Staged, retentions: int) -> None:
        self.problem = problem
        self.model: Any = cp_model.CpModel()
        self.horizon = entry_event(len(problem.nodes)) + 1
        self.unit = self._byte_unit()
        self.instances: list[list[Instance]] = []
        self.retained: dict[ValueId, list[Retention]] = {value: [] for value in problem.values}
        self.intervals: list[Any] = []
        self.demands: list[int] = []
        self._add_instances(retentions)
        self._add_retentions()
        self._add_order()
        self._add_reads()
        self._add_crossings()

    def _byte_unit(self) -> int:
        """The greatest common divisor of all sizes: scaling by it loses nothing."""
        sizes = [stored.size_bytes for stored in self.problem.values.values()]
        for node in self.problem.nodes:
            ways = (node.first, node.again)
            sizes += [way.workspace_bytes for way in ways if way is not None]
        sizes += [crossing.outside_bytes for crossing in self.problem.crossings]
        return max(1, math.gcd(*sizes)) if sizes else 1

    def _add_instances(self, retentions: int) -> None:
        """A first computation at its fixed event, later ones in any later stage of use."""
        last = last_uses(self.problem)
        for number, node in enumerate(self.problem.nodes):
            first = self.model.new_constant(node_event(number, number))
            always = self.model.new_constant(1)
            chosen = [Instance(node.first, first, always)]
            if node.again is not None:
                useful = useful_until(self.problem, node.again, last)
                events = [
                    node_event(stage, number)
                    for stage in range(number + 1, useful + 1)
                    if self.problem.may_recompute(number, stage)
                ]
                for _ in range(retentions - 1 if events else 0):
                    domain = cp_model.Domain.from_values(events)
                    start = self.model.new_int_var_from_domain(domain, "")
                    active = self.model.new_bool_var("")
                    chosen.append(Instance(node.again, start, active))
            self.instances.append(chosen)

    def _add_retentions(self) -> None:
        """Every instance of a value occupies memory from its event to its end."""
        for chosen in self.instances:
            for position, instance in enumerate(chosen):
                for value in instance.way.writes:
                    self._retain(value, instance, is_first=position == 0)
                self._occupy(instance.start, instance.active, instance.way.workspace_bytes)
        for crossing in self.problem.crossings:
            for value in crossing.tangents:
                start = self.model.new_constant(entry_event(crossing.stage) + 1)
                self._retain_from(value, None, start, None)

    def _retain(self, value: ValueId, instance: Instance, *, is_first: bool) -> None:
        stored = self.problem.values[value]
        if is_first or stored.recoverable:
            self._retain_from(value, instance, instance.start, instance.active)
        else:
            self._occupy(instance.start, instance.active, stored.size_bytes)

    def _retain_from(
        self, value: ValueId, instance: Instance | None, start: Any, active: Any
    ) -> None:
        stored = self.problem.values[value]
        if stored.forced_until == stored.ends:
            end = self.model.new_constant(
                self.horizon if stored.ends > len(self.problem.nodes) else entry_event(stored.ends)
            )
        else:
            end = self.model.new_int_var(0, self.horizon, "")
        length = self.model.new_int_var(1, self.horizon, "")
        if stored.size_bytes:
            interval = (
                self.model.new_interval_var(start, length, end, "")
                if active is None
                else self.model.new_optional_interval_var(start, length, end, active, "")
            )
            self.intervals.append(interval)
            self.demands.append(stored.size_bytes // self.unit)
        self.retained[value].append(Retention(instance, start, end))

    def _occupy(self, start: Any, active: Any, size_bytes: int) -> None:
        """Take memory during one event."""
        if size_bytes:
            interval = self.model.new_optional_fixed_size_interval_var(start, 1, active, "")
            self.intervals.append(interval)
            self.demands.append(size_bytes // self.unit)

    def _add_order(self) -> None:
        """Instances of a value follow each other; a later one exists only after the earlier."""
        for chosen in self.instances:
            for earlier, later in pairwise(chosen[1:]):
                self.model.add_implication(later.active, earlier.active)
        for retentions in self.retained.values():
            for earlier, later in pairwise(retentions):
                assert later.instance is not None
                self.model.add(earlier.end <= later.start).only_enforce_if(later.instance.active)

    def _add_reads(self) -> None:
        """A computation needs, for every value it reads, an instance that is retained then."""
        for chosen in self.instances:
            for reader in chosen:
                for value in reader.way.reads:
                    self._add_read(reader, self.retained[value])

    def _add_read(self, reader: Instance, retentions: list[Retention]) -> None:
        chosen: list[Any] = []
        for retention in retentions:
            serves = self.model.new_bool_var("")
            chosen.append(serves)
            if retention.instance is not None:
                self.model.add_implication(serves, retention.instance.active)
            self.model.add(retention.start + 1 <= reader.start).only_enforce_if(serves)
            self.model.add(retention.end >= reader.start + 1).only_enforce_if(serves)
        self.model.add_bool_or([*chosen, reader.active.Not()])

    def _add_crossings(self) -> None:
        """Memory of user code counts at the event that enters a stage."""
        always = self.model.new_constant(1)
        for crossing in self.problem.crossings:
            start = self.model.new_constant(entry_event(crossing.stage))
            self._occupy(start, always, crossing.outside_bytes)

    def capacity(self) -> int:
        """The budget in the model's unit."""
        return self.problem.capacity_bytes // self.unit

    def recomputation_cost(self) -> Any:
        """The cost of later computations, rounded down so that its bound stays valid."""
        base = self.problem.base_cost_s
        scale = _COST_UNITS / base if base > 0 else 0.0
        return sum(
            int(instance.way.cost_s * scale) * instance.active
            for chosen in self.instances
            for instance in chosen[1:]
        )

    def hint_nothing_recomputed(self) -> None:
        """Start the search from a step that keeps everything."""
        for chosen in self.instances:
            for instance in chosen[1:]:
                self.model.add_hint(instance.active, 0)

    def hint_solution(self, solver: Any) -> None:
        """Start the search from the solver's last solution."""
        self.model.clear_hints()
        again = [instance for chosen in self.instances for instance in chosen[1:]]
        hinted = [variable for instance in again for variable in (instance.active, instance.start)]
        hinted += [retention.end for chosen in self.retained.values() for retention in chosen]
        for variable in {variable.index: variable for variable in hinted}.values():
            self.model.add_hint(variable, solver.value(variable))

    def computes(self, value_of: Callable[[Any], int]) -> tuple[Compute, ...]:
        """The computes of a solution in the order of their events."""
        happening = [
            (value_of(instance.start), instance.way.compute)
            for chosen in self.instances
            for instance in chosen
            if value_of(instance.active)
        ]
        return tuple(compute for _, compute in sorted(happening, key=lambda item: item[0]))


class _SolutionReporter(cp_model.CpSolverSolutionCallback):
    """Reports every better schedule."""

    def __init__(self, model: IntervalModel, report: Report) -> None:
        super().__init__()
        self._model = model
        self._report = report

    def on_solution_callback(self) -> None:
        computes = self._model.computes(self.value)
        self._report(msgspec.msgpack.encode(IntervalReport(status="feasible", computes=computes)))


def serve(payload: bytes, report: Report) -> None:
    """Solve the task of the parent process and report schedules and bounds to it."""
    task = msgspec.msgpack.decode(payload, type=IntervalTask)
    started = time.perf_counter()
    status, bound = "unknown", 0.0
    for retentions in _RETENTIONS:
        model = IntervalModel(task.problem, retentions)
        status = _reach_capacity(model, task, started)
        if status == "feasible":
            status, bound = _minimise_cost(model, task, started, report)
        if status != "infeasible":
            break
    report(msgspec.msgpack.encode(IntervalReport(status=status, bound=bound)))


def _solver(task: IntervalTask, seconds: float) -> Any:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = max(1, task.limits.workers)
    solver.parameters.random_seed = task.limits.seed
    solver.parameters.max_time_in_seconds = max(0.1, seconds)
    solver.parameters.absolute_gap_limit = task.limits.gap * _COST_UNITS
    if task.limits.workers <= 1:
        solver.parameters.interleave_search = True
    return solver


def _reach_capacity(model: IntervalModel, task: IntervalTask, started: float) -> str:
    """Lower the peak until it fits (phase one of the paper); keep the solution as a hint."""
    peak = model.model.new_int_var(0, sum(model.demands), "")
    excess = model.model.new_int_var(0, sum(model.demands), "")
    model.model.add_cumulative(model.intervals, model.demands, peak)
    model.model.add(excess >= peak - model.capacity())
    model.hint_nothing_recomputed()
    model.model.minimize(excess)
    solver = _solver(task, (task.limits.seconds - (time.perf_counter() - started)) / 2)
    solver.parameters.absolute_gap_limit = 0.0
    answer = solver.solve(model.model)
    assert answer != cp_model.MODEL_INVALID, model.model.validate()
    if answer not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return "infeasible" if answer == cp_model.INFEASIBLE else "unknown"
    if solver.best_objective_bound > 0.5:
        return "infeasible"
    model.hint_solution(solver)
    model.model.add(excess == 0)
    return "feasible"


def _minimise_cost(
    model: IntervalModel, task: IntervalTask, started: float, report: Report
) -> tuple[str, float]:
    """Minimise recomputation within the capacity (phase two)."""
    model.model.minimize(model.recomputation_cost())
    solver = _solver(task, task.limits.seconds - (time.perf_counter() - started))
    answer = solver.solve(model.model, _SolutionReporter(model, report))
    assert answer != cp_model.MODEL_INVALID, model.model.validate()
    if answer == cp_model.INFEASIBLE:
        return "infeasible", 0.0
    return "feasible", max(0.0, solver.best_objective_bound / _COST_UNITS)
