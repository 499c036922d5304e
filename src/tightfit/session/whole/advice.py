"""What budget to advise where none is enough: one that holds for the steps to come, too."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.errors import InfeasibleBudget
from tightfit.planners.base import Limits
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.progress import SILENT
from tightfit.session.memory.account import Account
from tightfit.session.memory.surroundings import Surroundings, handed_out_bytes
from tightfit.session.options import Options
from tightfit.session.whole.specialisation import Specialisation
from tightfit.units import format_bytes

__all__ = ["Beside", "advised"]

_QUICKLY = Limits(seconds=2.0)


@dataclass(frozen=True)
class Beside:
    """Other calls of a callable that are open at the same time as one.

    Parameters
    ----------
    waiting : int
        How many before it await their backward.
    least_bytes : int
        What those to come keep, at least.
    """

    waiting: int
    least_bytes: int


def advised(
    error: InfeasibleBudget,
    one: Specialisation,
    around: Surroundings,
    account: Account,
    options: Options,
    beside: Beside,
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
    """
    more_bytes = one.captured.graph.constants_bytes["inputs"]  # a batch fetched before its turn
    new_bytes = account.new_gradient_bytes()
    later = Surroundings(
        gradients="accumulated",
        gradient_bytes=around.gradient_bytes + new_bytes,
        state_bytes=around.state_bytes,
        outside_bytes=around.outside_bytes,
        others_bytes=max(around.others_bytes, handed_out_bytes(one.captured)) + more_bytes,
        budget_bytes=around.budget_bytes,
        whole_bytes=around.whole_bytes,
    )
    graph = later.around(one.captured)
    adding = minimum_budget(graph, "accumulated", _QUICKLY, SILENT).found_bytes
    stepping = graph.constant_bytes + account.optimizers.passing_bytes()
    every = {
        "this call": error.minimum_bytes or 0,
        "calls that add to gradients": adding + beside.least_bytes,
        "the optimizer's step": stepping,
    }
    most = max(every, key=every.__getitem__)
    needed = every[most] + options.reserve_bytes
    text = str(error)
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
            "outputs (del loss)"
        )
    return InfeasibleBudget(
        text,
        budget_bytes=error.budget_bytes,
        minimum_bytes=needed,
        proven=error.proven,
    )
