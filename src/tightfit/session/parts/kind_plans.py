"""The plans found for one kind of part: a search that goes on holds these, and no module."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.plan import Plan
from tightfit.plan.verify import verify
from tightfit.planners.base import Limits
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.session.step.holding import Holding, holding_of

_LEAST_SHARE = 0.3  # of a search's time
_MOST_FOUND = 64
_OUTSIDE_SHARES = (0.0, 0.5, 1.0)  # of the part's own bytes with nothing recomputed


@dataclass(eq=False)
class KindPlans:
    """The plans of parts that are alike."""

    graph: Graph  # the step of such a part, priced
    name: str  # the first such part; no two kinds have the same
    # least, most: by the plan that saves least of those found, and by that which keeps everything
    least: Holding
    most: Holding
    alike: int = 1  # how many parts of this kind the model may have
    _found: list[Holding] = field(default_factory=list)
    _least_was_searched: bool = False

    @property
    def menu(self) -> list[Holding]:
        """All plans that were found for it, for any step."""
        return [self.least, self.most, *self._found]

    def note(self, found: Holding) -> None:
        """Keep a plan in mind that was found for some step: another may run it."""
        if all(found.plan != other.plan for other in self.menu):
            self._found.append(found)
            del self._found[:-_MOST_FOUND]

    def search_least(self, limits: Limits) -> bool:
        """Search longer for a plan that holds little; return whether a better plan was found."""
        if self._least_was_searched:
            return False
        self._least_was_searched = True
        patient = msgspec.structs.replace(limits, seconds=limits.seconds / _LEAST_SHARE)
        plan = least_plan(self.graph, self.alike, patient)
        verify(plan, self.graph)
        found, before = holding_of(self.graph, plan), self.least
        if _held_bytes(found, self.alike) >= _held_bytes(before, self.alike):
            return False
        self.least = found
        self.note(before)
        return True


def least_plan(graph: Graph, alike: int, limits: Limits) -> Plan:
    """Return a plan with which a model of such parts holds little at its peak.

    Saving less makes the peak of a backward higher. Plans are searched for little, much and nothing
    held outside. The plan is taken with which that many parts, one at its peak, hold least.

    `alike`: how many parts of this kind the model may have.
    """
    eager_bytes = eager_peak_bytes(graph) - graph.constant_bytes
    outsides = [round(share * eager_bytes) for share in _OUTSIDE_SHARES]
    own = msgspec.structs.replace(limits, seconds=_LEAST_SHARE * limits.seconds / len(outsides))
    plans = [minimum_budget(graph.with_outside(outside), limits=own).plan for outside in outsides]

    return min(plans, key=lambda plan: _held_bytes(holding_of(graph, plan), alike))


def _held_bytes(holding: Holding, alike: int) -> int:
    """Return the bytes of that many parts, one of them at its peak."""
    return holding.peak_bytes + (alike - 1) * holding.staying_bytes
