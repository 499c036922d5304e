"""Gist: nothing is computed again; saved values are kept in fewer bytes.

Binarize (bits of a ReLU, places of maxima), sparse storage behind a ReLU, delayed precision
reduction of the rest, ReLU in place (Jain et al., 2018; MONeT, appendix E). A graph offers
alternatives of the contributors that were allowed: halves and sparse storage only where `"lossy"`
is.
"""

from __future__ import annotations

from tightfit.graph.ir import Alternative, Graph, Op, OpId, ValueId
from tightfit.graph.liveness import computed_ops
from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.papers.proposals import cheapest_that_fits
from tightfit.progress import Progress

_BINARIZE = ("relu.from_bits", "max_pool.from_offsets", "dropout.from_bits")
_STASHED = ("from_sparse.", "from_half.")  # the better first
_IN_PLACE = "aten.relu"


def plan_gist(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Return Gist's plan, if it fits: it is one plan for all budgets."""
    proposals = [gist_schedule(task.graph)]
    return cheapest_that_fits(task, proposals, limits, progress, title="gist")


def gist_schedule(graph: Graph) -> list[Compute]:
    """Return the ops that Gist computes, and how."""
    chosen = {op.id: _encoded(op) for op in graph.ops}
    chosen |= _relus_in_place(graph, chosen)
    linked = {op for choice in graph.choices for branch in choice.branches for op, _ in branch}
    chosen |= dict.fromkeys(linked, 0)
    ways = {op.id: op.alternatives[chosen[op.id]] for op in computed_ops(graph, chosen)}
    return [Compute(op, chosen[op], way.cheapest) for op, way in ways.items()]


def _encoded(op: Op) -> int:
    """Return the alternative that reads the fewest bytes by Gist's means, else the default."""
    for kind in (*_BINARIZE, *_STASHED):
        for place, way in enumerate(op.alternatives):
            if way.name == kind or (kind in _STASHED and way.name.startswith(kind)):
                return place
    return 0


def _relus_in_place(graph: Graph, chosen: dict[OpId, int]) -> dict[OpId, int]:
    """Return the ReLUs that may run over their input: no op that runs later reads it."""
    last: dict[ValueId, OpId] = {}
    for op in computed_ops(graph, chosen):
        last |= dict.fromkeys(op.alternatives[chosen[op.id]].reads, op.id)
    return {
        op.id: place
        for op in graph.ops
        if op.target == _IN_PLACE
        for place, way in enumerate(op.alternatives)
        if _is_over_its_input(way) and last.get(way.reads[0]) == op.id
    }


def _is_over_its_input(way: Alternative) -> bool:
    return way.use != "again" and way.reads == (way.overwrites,)
