"""Kinds of parts: parts that are alike share what was captured, its costs and its plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from tightfit.capture.lift import Captured
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import Plan
from tightfit.planners.base import Limits
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.session.parts.ledger import Holding, holding_of
from tightfit.session.stages import with_outside

__all__ = ["Kind", "least_plan", "most_plan"]

_LEAST_SHARE = 0.3  # of a search's time, for the plan of the first steps
_OUTSIDE_SHARES = (0.0, 0.5, 1.0)  # of what the part holds itself with nothing recomputed


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
    repeated : tuple of int
        Flattened inputs that the captured step takes again, for each use; see `capture.uses`.
    """

    captured: Captured
    name: str
    least: Holding
    most: Holding
    repeated: tuple[int, ...] = ()
    _runners: WeakKeyDictionary[Holding, Runner] = field(default_factory=WeakKeyDictionary)

    def inputs(self, leaves: list[Any]) -> list[Any]:
        """Return the flattened inputs of the captured step for those of a call."""
        return [*leaves, *(leaves[place] for place in self.repeated)]

    def runner(self, holding: Holding) -> Runner:
        """Return what runs a plan; it is lowered the first time."""
        if holding not in self._runners:
            self._runners[holding] = Runner(self.captured, lower(self.captured, holding.plan))
        return self._runners[holding]


def most_plan(graph: Graph) -> Plan:
    """Return the plan that keeps everything."""
    peak_bytes = eager_peak_bytes(graph)
    return assemble(graph, keep_everything(graph), budget_bytes=peak_bytes)


def least_plan(graph: Graph, alike: int, limits: Limits) -> Plan:
    """Return a plan with which a model of such parts holds little at its peak.

    Saving less makes the peak of a backward higher: plans are sought for little, much and nothing
    held outside, and the one is taken with which that many parts, one at its peak, hold least.

    Parameters
    ----------
    alike : int
        How many parts of this kind the model may have.
    """
    eager_bytes = eager_peak_bytes(graph) - graph.constant_bytes
    outsides = [round(share * eager_bytes) for share in _OUTSIDE_SHARES]
    own = msgspec.structs.replace(limits, seconds=_LEAST_SHARE * limits.seconds / len(outsides))
    plans = [minimum_budget(with_outside(graph, outside), limits=own).plan for outside in outsides]

    def held_bytes(plan: Plan) -> int:
        holding = holding_of(graph, plan)
        return holding.peak_bytes + (alike - 1) * holding.staying_bytes

    return min(plans, key=held_bytes)
