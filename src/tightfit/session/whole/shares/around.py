"""What lies around a whole step when it is called, and which part of the budget is left for it."""

from __future__ import annotations

from functools import partial
from typing import Any

from tightfit.capture.captured import Captured
from tightfit.plan.plan import Gradients
from tightfit.session.memory.account import Account
from tightfit.session.memory.budget import Share
from tightfit.session.memory.surroundings import Surroundings, root_gradient_bytes
from tightfit.session.options import Options
from tightfit.session.whole.shares.flight import Flight
from tightfit.session.whole.specialisation import Specialisation

__all__ = ["around_step"]


def around_step(
    one: Specialisation,
    inputs: list[Any],
    account: Account,
    options: Options,
    flight: Flight,
    share: Share | None = None,
) -> Surroundings:
    """Return what lies around a step now.

    Parameters
    ----------
    one : Specialisation
        The step.
    inputs : list
        What its placeholders are.
    account : Account
        What its callable holds.
    options : Options
        The user's.
    flight : Flight
        Calls that await their backward at once.
    share : Share, optional
        Of the budget; None: what is left for it now.
    """
    graph = one.captured.graph
    standing = account.standing(inputs, options.beside(account))
    state_bytes = standing.state_bytes + standing.coming_bytes
    others_bytes = standing.others_bytes + standing.others_coming_bytes + one.surplus_bytes
    if share is None:
        held = standing.gradient_bytes + state_bytes + others_bytes
        held += graph.constant_bytes + root_gradient_bytes(one.captured)
        share = options.share_of(account, graph, held, flight.calls, flight.waiting_bytes)
    if share is None:
        alone = partial(around_step, one, inputs, account, options, flight, Share(0))
        share = flight.share(one, alone, options)
    return Surroundings(
        gradients=_gradients(one.captured, inputs, account),
        gradient_bytes=standing.gradient_bytes,
        state_bytes=state_bytes,
        outside_bytes=max(one.outside_bytes, share.others_bytes),
        others_bytes=others_bytes,
        budget_bytes=share.peak_bytes,
        whole_bytes=options.usable_bytes,
        part=share.part,
    )


def _gradients(captured: Captured, inputs: list[Any], account: Account) -> Gradients:
    """Return whether gradients outlive their hand-over, or go into what exists before."""
    owners = [inputs[position] for _, position in captured.joint.gradients]
    missing = [o for o in owners if not o.is_leaf or o.grad is None]
    taken = account.replicas is not None and account.replicas.takes(missing)
    return "fresh" if missing and not taken else "accumulated"
