"""What budget to advise where none is enough: one that holds for the steps to come, too."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from tightfit.capture.captured import Captured
from tightfit.capture.nodes import flat_outputs, storage_bytes
from tightfit.errors import InfeasibleBudget
from tightfit.graph.ir import Graph
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import no_plan
from tightfit.planners.questions.infeasible import (
    Expected,
    NoPlan,
    infeasible,
    infeasible_message,
)
from tightfit.planners.questions.minimum import MinimumBudget, minimum_budget
from tightfit.progress import SILENT
from tightfit.session.memory.account import Account
from tightfit.session.memory.surroundings import (
    Surroundings,
    handed_out_bytes,
    kept_by_loss_bytes,
)
from tightfit.session.options import Options
from tightfit.session.whole.specialisation import Specialisation
from tightfit.units import format_bytes

__all__ = ["Beside", "advised"]

_QUICKLY = Limits(seconds=2.0)
_NUMBERS_BYTES = 4 << 10  # losses, counts and averages that a loop keeps


@dataclass(frozen=True)
class Beside:
    """Other calls that are open at the same time as one.

    Parameters
    ----------
    waiting : int
        How many of the same callable before it await their backward.
    least_bytes : int
        What those to come keep, at least.
    company_bytes : int
        A size with room for all calls of the step, where others share the budget.
    """

    waiting: int
    least_bytes: int
    company_bytes: int


def advised(
    error: InfeasibleBudget,
    one: Specialisation,
    around: Surroundings,
    account: Account,
    options: Options,
    beside: Beside,
    expected: Expected | None,
) -> InfeasibleBudget:
    """Return an error that names a budget which holds for further steps of the same kind.

    Gradients may be added to by several calls before an optimizer steps, a loop may hold a further
    batch and what the forward before returned, and the optimizer's step takes memory, too.

    Parameters
    ----------
    error : InfeasibleBudget
        Names the least budget of the call that was asked for.
    one : Specialisation
        The captured step.
    around : Surroundings
        What lies around it.
    account : Account
        What its callable holds.
    options : Options
        The user's.
    beside : Beside
        Its other calls that are open at the same time.
    expected : Expected or None
        What of what lies around it was not seen yet; None: the text says nothing of that.
    """
    error = _with_more_room(error, one, around)
    more_bytes = one.captured.graph.constants_bytes["inputs"]  # a batch fetched before its turn
    new_bytes = account.new_gradient_bytes()
    in_company = beside.company_bytes
    handed_bytes = handed_out_bytes(one.captured) + kept_by_loss_bytes(one.captured)
    handed_bytes += _NUMBERS_BYTES
    later = Surroundings(
        gradients="accumulated",
        gradient_bytes=around.gradient_bytes + new_bytes,
        state_bytes=around.state_bytes,
        outside_bytes=around.outside_bytes,
        others_bytes=max(around.others_bytes, handed_bytes) + more_bytes,
        budget_bytes=around.budget_bytes,
        whole_bytes=around.whole_bytes,
        part=around.part,
    )
    graph = later.around(one.captured)
    adding = minimum_budget(graph, "accumulated", _QUICKLY, SILENT).found_bytes
    more = _with_more_ways(one, later)
    adding = adding if more is None else min(adding, more.named_bytes)
    stepping = graph.constant_bytes + account.optimizers.passing_bytes()
    every = {
        "this call": error.minimum_bytes or 0,
        "calls that add to gradients": adding + beside.least_bytes,
        "calls within the same budget": in_company and in_company + handed_bytes + more_bytes,
        "the optimizer's step": stepping,
    }
    most = max(every, key=every.__getitem__)
    needed = every[most] + options.reserve_bytes
    text, proven = str(error), error.proven
    if isinstance(error, NoPlan) and expected is not None:
        text = infeasible_message(error.task, error.outcome, error.least, expected)
        proven = proven and expected.proven_bytes > options.planned_bytes
    return InfeasibleBudget(
        text + _in_words(error, needed, most, beside),
        budget_bytes=error.budget_bytes,
        minimum_bytes=needed,
        proven=proven,
        call_bytes=error.minimum_bytes,
    )


def _in_words(error: InfeasibleBudget, needed: int, most: str, beside: Beside) -> str:
    """Return what the advice adds to the text of an error."""
    text = ""
    if needed != error.minimum_bytes:
        verb = "needs" if most == "the optimizer's step" else "need"
        why = "" if most == "this call" else f": {most} {verb} more than this one"
        text += (
            f"\n  later     a budget of {needed} bytes ({format_bytes(needed)}) is enough for "
            f"all steps to come{why}"
        )
    if beside.waiting:
        text += (
            f"\n  waiting   {beside.waiting} of its calls before this one await their backward, "
            "and what that needs is kept; if none is to come: torch.no_grad(), or let go of the "
            f"outputs (del loss); else in_flight={beside.waiting + 1} has each of them leave room "
            "for the others"
        )
    return text


@dataclass(frozen=True)
class _More:
    """The least budget that has room to compare more ways with their defaults.

    Parameters
    ----------
    task : Task
        The step with those ways.
    least : MinimumBudget
        Of that step.
    named_bytes : int
        Enough for its least plan, and for the comparisons.
    """

    task: Task
    least: MinimumBudget
    named_bytes: int


def _with_more_ways(one: Specialisation, around: Surroundings) -> _More | None:
    """Return what larger budget allows the ways this one has no room to compare; None: no such."""
    beyond = one.captured.beyond
    if beyond is None:
        return None
    task = around.task(one.captured.with_graph(beyond))
    least = minimum_budget(task.graph, task.gradients, _QUICKLY, SILENT)
    comparing = task.graph.constant_bytes + _compared_bytes(one.captured, beyond)
    return _More(task, least, max(least.found_bytes, comparing))


def _compared_bytes(captured: Captured, beyond: Graph) -> int:
    """Return what the largest comparison takes: what both ways read, what the default makes."""
    taken = [0]
    for op, more, calls in zip(captured.graph.ops, beyond.ops, captured.calls, strict=True):
        if len(more.alternatives) == len(op.alternatives):
            continue
        default, values = op.alternatives[0], beyond.values
        given = (x for node in set(calls[0].nodes()) for x in flat_outputs(node))
        further = {v for way in more.alternatives for v in way.reads} - set(default.reads)
        workspace = min(variant.workspace_bytes for variant in default.variants)
        sizes = (values[v].size_bytes for v in (*further, *default.writes))
        taken.append(sum(map(storage_bytes, given)) + sum(sizes) + workspace)
    return max(taken)


def _with_more_room(
    error: InfeasibleBudget, one: Specialisation, around: Surroundings
) -> InfeasibleBudget:
    """Return an error that names a smaller budget, if there is one that has room for more ways."""
    more = _with_more_ways(one, around)
    if more is None or more.task.budget_bytes >= more.least.found_bytes:
        return error
    if more.named_bytes >= (error.minimum_bytes or 0):
        return error
    proven = more.least.lower_bytes > more.task.budget_bytes
    nothing = no_plan(started=time.perf_counter(), proven=proven)
    named = msgspec.structs.replace(more.least, found_bytes=more.named_bytes)
    return infeasible(more.task, nothing, named)
