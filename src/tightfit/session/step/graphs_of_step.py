"""The plans of the graphs of one step, where there are several: for the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.explain import PlannedPart
from tightfit.plan.plan import Outcome, Plan
from tightfit.session.report import Report
from tightfit.session.step.holding import holding_of, overhead_of


class Planned(Protocol):
    """A plan that has run, with the graph that it was made for."""

    @property
    def graph(self) -> Graph:
        """The graph, with memory resident around the step."""

    @property
    def outcome(self) -> Outcome:
        """Its plan."""

    @property
    def number(self) -> int:
        """Its identity."""


@dataclass(frozen=True, eq=False)
class _Call:
    captured: Graph  # without memory resident around the step
    planned: Planned

    @property
    def plan(self) -> Plan:
        assert self.planned.outcome.plan is not None
        return self.planned.outcome.plan


class GraphsOfStep:
    """The calls of graphs in the current step, or in the last."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: list[_Call] = []

    def note_call(self, captured: Graph, planned: Planned, *, is_first: bool) -> None:
        """Note a call; the first begins a step."""
        if is_first:
            self._calls.clear()
        self._calls.append(_Call(captured, planned))

    def plain_bytes(self) -> int:
        """Return the most bytes of plain PyTorch in the step: those of all calls together."""
        resident_bytes, own_bytes = 0, 0
        for call in self._calls:
            graph = call.planned.graph
            peak_bytes = eager_peak_bytes(graph, gradients=call.plan.gradients)
            resident_bytes = max(resident_bytes, graph.constant_bytes)
            own_bytes += peak_bytes - graph.constant_bytes
        return resident_bytes + own_bytes

    def added_to(self, report: Report) -> Report:
        """Return the report of the last call, or of the whole step if several graphs ran in it."""
        kinds = dict.fromkeys(id(call.captured) for call in self._calls)
        if len(kinds) < 2:
            return report
        names = {kind: f"{self._name} (graph {i + 1})" for i, kind in enumerate(kinds)}
        numbers = Counter(call.planned.number for call in self._calls)
        plans: dict[str, tuple[Plan, ...]] = {}
        parts: list[PlannedPart] = []
        for call in {call.planned.number: call for call in self._calls}.values():
            name, count = names[id(call.captured)], numbers[call.planned.number]
            plans[name] = (*plans.get(name, ()), call.plan)
            parts.append(PlannedPart(name, call.planned.graph, call.plan, count))
        overhead = overhead_of([holding_of(c.planned.graph, c.plan) for c in self._calls])
        return msgspec.structs.replace(
            report,
            planned_peak_bytes=max(c.planned.outcome.peak_bytes for c in self._calls),
            overhead=overhead,
            bound=0.0,
            gap=overhead,
            status="feasible",
            plan=None,
            plans=plans,
            calls=len(self._calls),
            parts=tuple(parts),
        )
