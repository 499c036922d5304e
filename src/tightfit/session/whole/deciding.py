"""Steps that go on as values decide, and otherwise in nearly every call."""

from __future__ import annotations

import gc
from collections.abc import Callable

from tightfit.allocator.tally import if_room
from tightfit.errors import BudgetExceeded, CaptureError, InfeasibleBudget, first_of
from tightfit.progress import announce
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.specialisation import Specialisation

__all__ = ["with_deciding_ops"]


def with_deciding_ops(
    captures: Captures,
    unfit: Specialisation,
    captured: Callable[[], Specialisation],
    *,
    by_inputs: bool = False,
) -> Specialisation | None:
    """Return a step in which the modules that decide are ops, whatever they run; say it.

    None where the outermost forward decides, or where that cannot be planned in the budget.

    Parameters
    ----------
    captures : Captures
        What is known for capturing.
    unfit : Specialisation
        What does not serve, as its values are other ones now.
    captured : callable
        Captures the call anew, with what is known then, and plans it.
    by_inputs : bool
        Whether inputs decide, and not only values that are computed.
    """
    name = captures.callee.name
    named = captures.run_as_ops(unfit, by_inputs=by_inputs)
    one = _captured_with(captures, named, captured) if named else None
    if ("" in named and one is None) or not named:
        announce(
            f"what {name} runs is decided by values of its inputs or that it computes, and "
            "otherwise in every step: each takes a plan of its own. Way out: move the part that "
            "decides into a module of its own, which then runs as one op (tightfit.opaque)"
        )
    if one is not None:
        shown = first_of(
            [f"module {each!r}" if each else f"all of {name}" for each in sorted(named)]
        )
        announce(
            f"what {shown} runs is decided otherwise in every step: from now on it runs eagerly, "
            "as one measured op of the plan (tightfit.opaque says so of modules beforehand)"
        )
    return one


def _captured_with(
    captures: Captures, named: frozenset[str], captured: Callable[[], Specialisation]
) -> Specialisation | None:
    """Return a step in which some modules are ops, if there is one and it fits."""
    try:
        one = if_room(captured)
    except (BudgetExceeded, CaptureError, InfeasibleBudget):
        one = None
    if one is None:
        captures.decided.run_as_traced(named)
        gc.collect()  # what the attempt has held
    return one
