"""Kinds of parts: parts that are alike share what was captured, its costs and its plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec

from tightfit.api.parts.ledger import Holding
from tightfit.api.pipeline import with_outside
from tightfit.capture.lift import Captured
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import Plan
from tightfit.planners.base import Limits
from tightfit.planners.minimum import minimum_budget

__all__ = ["Kind", "least_plan", "most_plan"]

_LEAST_SHARE = 0.3  # of a search's time, for the plan of the first steps


@dataclass(eq=False)
class Kind:
    """Parts that are alike: one captured step, one plan.

    Parameters
    ----------
    captured : Captured
        The step of such a part, priced.
    name : str
        The first such part; no two kinds have the same.
    least, most : Holding
        By the plan that saves least, and by the one that keeps everything.
    """

    captured: Captured
    name: str
    least: Holding
    most: Holding
    _runners: WeakKeyDictionary[Holding, Runner] = field(default_factory=WeakKeyDictionary)

    @property
    def output_bytes(self) -> int:
        """What it returns."""
        values = self.captured.graph.values
        return sum(value.size_bytes for value in values if value.fate == "returned")

    def runner(self, holding: Holding) -> Runner:
        """Return what runs a plan; it is lowered the first time."""
        if holding not in self._runners:
            self._runners[holding] = Runner(self.captured, lower(self.captured, holding.plan))
        return self._runners[holding]


def most_plan(graph: Graph) -> Plan:
    """Return the plan that keeps everything."""
    peak_bytes = eager_peak_bytes(graph)
    return assemble(graph, keep_everything(graph), budget_bytes=peak_bytes)


def least_plan(graph: Graph, room_bytes: int, limits: Limits) -> Plan:
    """Return a plan that saves as little as possible and holds little at its peak.

    Parameters
    ----------
    room_bytes : int
        What is left of the budget: half of it is taken for what others hold when backward begins.
    """
    eager_bytes = eager_peak_bytes(graph) - graph.constant_bytes
    outside_bytes = max(0, min(eager_bytes, room_bytes // 2))
    own = msgspec.structs.replace(limits, seconds=_LEAST_SHARE * limits.seconds)
    return minimum_budget(with_outside(graph, outside_bytes), limits=own).plan
