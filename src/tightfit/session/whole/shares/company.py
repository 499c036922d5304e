"""Steps of several callables within one budget: what each must know and leave of it."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.session.memory.account import Account
from tightfit.session.memory.budget import Budget
from tightfit.session.memory.surroundings import Surroundings
from tightfit.session.options import Options
from tightfit.session.whole.planning import quick_needs
from tightfit.session.whole.specialisation import Specialisation

__all__ = ["begin_in_company", "declare", "end_in_company", "is_new_in_company"]


def declare(
    one: Specialisation, around: Surroundings, account: Account, options: Options, budget: Budget
) -> MinimumBudget:
    """Tell a budget what plans of a step can do with; return the least."""
    least, needs = quick_needs(one, around, options, account.new_gradient_bytes())
    budget.declare(account, around.gradients, needs)
    return least


def is_new_in_company(one: Specialisation, options: Options) -> bool:
    """Whether a step runs for the first time beside others: with the plan that holds least.

    Nobody knows yet what others that are called before its backward will hold.
    """
    shared = options.shared
    if shared is None or not options.is_in_company:
        return False
    return not (one.plans and shared.has_closed)


def begin_in_company(
    one: Specialisation,
    around: Callable[[], Surroundings],
    account: Account,
    options: Options,
) -> None:
    """Note a call in a shared budget, and what its plans can do with."""
    shared = options.shared
    if shared is None or not options.is_in_company:
        return
    shared.begins(account)
    found = around()
    if not shared.knows(account, found.gradients):
        declare(one, found, account, options, shared)


def end_in_company(account: Account, options: Options, *, is_open: bool) -> None:
    """End the step once nobody awaits a backward: its budget is for whatever comes now."""
    shared = options.shared
    if is_open:
        return
    if shared is None:
        account.rest()
    elif not shared.open_members():
        shared.closes()
        for member in shared.members():
            member.rest()
