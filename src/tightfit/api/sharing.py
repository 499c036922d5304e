"""How the parts of a model share one budget: what each may save, what each may hold at its peak.

Parts that run one after the other hold their saved activations at the same time, but only one of
them is at its peak. Saving more in every part leaves less room for the peak of each: one number,
how far between the least and the most each part saves, is tried out, and the plans that make the
step cheapest are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec

from tightfit.api.ledger import Holding, Ledger, holding_of
from tightfit.api.options import Options
from tightfit.api.pipeline import plan_task, with_outside
from tightfit.capture.lift import Captured
from tightfit.errors import BadInput
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import Plan
from tightfit.planners.base import Limits, Task
from tightfit.planners.minimum import minimum_budget
from tightfit.units import format_bytes

__all__ = [
    "Kind",
    "Level",
    "PartsReport",
    "choose",
    "least_plan",
    "most_plan",
    "refuse_options",
    "report_of_parts",
]

_LEAST_SHARE = 0.3  # of a search's time, for the plan of the first steps
_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


class PartsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the plans of a model's parts promise and what the last step held.

    Parameters
    ----------
    budget_bytes, planned_peak_bytes : int
        The limit, and the peak that follows from the plans and from what else was measured.
    measured_peak_bytes : int
        The peak of the last complete step.
    overhead : float
        Of the parts, as a fraction of their cost with nothing recomputed.
    cost_source : str
        Where costs come from.
    calls : int
        Calls of parts in a step.
    plans : dict of str to Plan
        For each kind of part, named by the first one, its plan.
    """

    budget_bytes: int
    planned_peak_bytes: int
    measured_peak_bytes: int
    overhead: float
    cost_source: str
    calls: int
    plans: dict[str, Plan]

    def __str__(self) -> str:
        """Return two lines for people."""
        return (
            f"budget {format_bytes(self.budget_bytes)}: planned peak "
            f"{format_bytes(self.planned_peak_bytes)}, measured "
            f"{format_bytes(self.measured_peak_bytes)}\n"
            f"extra compute {self.overhead:.1%} of {self.calls} planned parts of "
            f"{len(self.plans)} kinds (costs {self.cost_source})"
        )


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

    def runner(self, holding: Holding) -> Runner:
        """Return what runs a plan; it is lowered the first time."""
        if holding not in self._runners:
            self._runners[holding] = Runner(self.captured, lower(self.captured, holding.plan))
        return self._runners[holding]


@dataclass
class Level:
    """What is known of steps with the same inputs that begin with about as much held.

    Parameters
    ----------
    held_bytes : int
        At the begin.
    ledger : Ledger or None
        The last such step.
    chosen : dict of Kind to Holding
        The plans of the kinds of parts; empty while they are learned about.
    planned_bytes : int
        The peak that follows, all that is held included.
    """

    held_bytes: int
    ledger: Ledger[Kind] | None = None
    chosen: dict[Kind, Holding] = field(default_factory=dict)
    planned_bytes: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether there is a kind of part without a chosen plan."""
        assert self.ledger is not None
        return any(kind not in self.chosen for kind in self.ledger.calls)


def report_of_parts(
    ledger: Ledger[Kind], begin_bytes: int, planned_bytes: int, limit_bytes: int
) -> PartsReport:
    """Return what a measured step showed.

    Parameters
    ----------
    begin_bytes : int
        Held at its begin.
    planned_bytes, limit_bytes : int
        The peak that was planned, and the limit.
    """
    cost_s = sum(holding.cost_s for holding in ledger.holdings)
    least_s = sum(holding.baseline_cost_s for holding in ledger.holdings)
    calls = zip(ledger.calls, ledger.holdings, strict=True)
    return PartsReport(
        budget_bytes=limit_bytes,
        planned_peak_bytes=planned_bytes,
        measured_peak_bytes=begin_bytes + ledger.peak_bytes,
        overhead=cost_s / least_s - 1 if least_s > 0 else 0.0,
        cost_source=next((kind.captured.graph.cost_source for kind in ledger.calls), "none"),
        calls=len(ledger.calls),
        plans={kind.name: holding.plan for kind, holding in calls},
    )


def refuse_options(options: Options) -> None:
    """Refuse what is not done part by part.

    Raises
    ------
    BadInput
        Names it.
    """
    wanted = {
        "budget='device'": options.budget_bytes is None,
        "a shared Budget": options.shared is not None,
        "plan=": options.plan is not None,
        "compile=": options.compile,
        "in_flight=": options.in_flight != 1,
    }
    refused = [name for name, is_wanted in wanted.items() if is_wanted]
    if refused:
        raise BadInput(
            f"a model planned part by part takes no {', no '.join(refused)}: give a budget in "
            "bytes of its own, such as '8GiB', and leave the rest out"
        )


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


def choose(ledger: Ledger[Kind], limit_bytes: int, options: Options) -> dict[Kind, Holding] | None:
    """Return the plan of each kind of part that makes a step cheapest within a limit.

    Parameters
    ----------
    ledger : Ledger
        A measured step.
    limit_bytes : int
        Above the begin of the step.
    options : Options
        Say which planner searches, and how long.

    Returns
    -------
    dict or None
        None if no choice was found that fits.
    """
    kinds = dict.fromkeys(ledger.calls)
    found = [{kind: kind.least for kind in kinds}]
    for share in _SHARES:
        saved = {kind: _saved_bytes(kind, share) for kind in kinds}
        chosen = {
            kind: holding
            for kind in kinds
            if (
                holding := _planned(
                    kind, saved[kind], ledger.room(kind, saved, limit_bytes), options
                )
            )
        }
        if len(chosen) == len(kinds):
            found.append(chosen)
    fitting = [chosen for chosen in found if ledger.peak_with(chosen) <= limit_bytes]
    return min(fitting, key=lambda chosen: _cost_s(ledger, chosen), default=None)


def _saved_bytes(kind: Kind, share: float) -> int:
    """Return a share of the way from the least to the most that a part may save."""
    least, most = kind.least.saved_bytes, kind.most.saved_bytes
    return least + round(share * max(0, most - least))


def _cost_s(ledger: Ledger[Kind], chosen: Mapping[Kind, Holding]) -> float:
    return sum(chosen[kind].cost_s for kind in ledger.calls)


def _planned(kind: Kind, saved_bytes: int, room_bytes: int, options: Options) -> Holding | None:
    """Return the cheapest plan found that keeps to what may be saved and held at the peak."""
    graph = kind.captured.graph
    outputs = sum(value.size_bytes for value in graph.values if value.fate == "returned")
    outside_bytes = max(0, room_bytes - saved_bytes - outputs)
    if room_bytes <= 0:
        return None
    if kind.most.saved_bytes <= saved_bytes and _peak_bytes(kind.most) <= room_bytes:
        return kind.most
    seconds = options.limits.seconds / len(_SHARES)
    task = Task(
        graph=with_outside(graph, outside_bytes), budget_bytes=graph.constant_bytes + room_bytes
    )
    limits = msgspec.structs.replace(options.limits, seconds=seconds)
    plan = plan_task(task, options.planner, limits, options.progress).plan
    return holding_of(graph, plan) if plan is not None else None


def _peak_bytes(holding: Holding) -> int:
    backward = holding.rise_bytes + holding.saved_bytes + holding.ends_bytes
    return max(holding.forward_bytes, backward)
