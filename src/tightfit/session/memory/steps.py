"""Refusing the step of an optimizer that would not fit, before it has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tightfit.allocator.tally import free_for
from tightfit.errors import BudgetExceeded
from tightfit.session.memory.account import Account
from tightfit.session.memory.forecast import SCALARS, StepNeeds, step_needs
from tightfit.session.memory.surroundings import with_slack
from tightfit.units import format_bytes

_OTHER_OPTIONS = ({"foreach": False, "fused": None}, {"foreach": None, "fused": True})


def stepping_bytes(account: Account) -> int:
    """Return the least bytes held from the optimizer's step to a call, gradients included."""
    coming_bytes = account.expected_bytes() + account.temporary_bytes()
    return account.lasting_bytes() + coming_bytes


def refuse_step(
    name: str,
    account: Account,
    optimizer: Any,
    skipped: frozenset[int],
    limiter: Account,
    coming: Callable[[], int],
) -> None:
    """Raise if the step of an optimizer would exceed a budget; nothing has been changed then.

    `optimizer`: is about to step. It is not refused if its step cannot be predicted. Where more is
    held than the limit already, it is not refused if it takes but a few scalars. `skipped`: the
    identities of its parameters without a gradient. `limiter`: the account that has the limit; of
    several models within one budget, that called last. `coming`: returns the least budget for later
    steps, as far as it is known. Raises `BudgetExceeded`: names the bytes of the step, and what to
    try.
    """
    most = account.optimizers.step_needs(optimizer)  # known, while parameters take turns
    limit_bytes = limiter.limit_bytes
    if most is None or limit_bytes is None:
        return
    held_bytes = limiter.held_bytes()
    scalars_bytes = SCALARS * account.granularity_bytes  # at most: kernels may take fewer
    if held_bytes + _taken_bytes(most, account) - scalars_bytes <= limit_bytes:
        return
    needs = step_needs(optimizer, account.granularity_bytes, skipped=skipped) or most
    taken_bytes = _taken_bytes(needs, account)
    lacking_bytes = held_bytes + taken_bytes - scalars_bytes - limit_bytes
    if lacking_bytes > 0 and free_for(lacking_bytes, account.device):
        held_bytes = limiter.held_bytes()
    needed_bytes = held_bytes + taken_bytes
    if needed_bytes - scalars_bytes <= limit_bytes:
        return
    if taken_bytes <= scalars_bytes and held_bytes > limit_bytes:
        return
    room_bytes = limit_bytes - held_bytes
    own_bytes = with_slack(needed_bytes)
    named_bytes = max(own_bytes, coming(), with_slack(limiter.later_steps_bytes()))
    helps = []
    if named_bytes == own_bytes:
        helps = [
            _text(o) for o in _OTHER_OPTIONS if _fits(o, account, optimizer, skipped, room_bytes)
        ]
    advice = f"{' or '.join(helps)} fits; else " if helps else ""
    raise BudgetExceeded(
        f"the step of {type(optimizer).__name__} for {name} would hold "
        f"{format_bytes(needed_bytes)}, more than the budget of {format_bytes(limit_bytes)}: "
        f"{format_bytes(held_bytes)} are held before it, and it takes "
        f"{format_bytes(taken_bytes)} for its state and its temporary tensors. "
        f"Nothing has been changed. What to try: {advice}a budget of {named_bytes} bytes",
        budget_bytes=limit_bytes,
        measured_bytes=named_bytes,
    )


def _taken_bytes(needs: StepNeeds, account: Account) -> int:
    return needs.state_bytes(account.device.type) + needs.temporary_bytes


def _fits(
    options: dict[str, Any],
    account: Account,
    optimizer: Any,
    skipped: frozenset[int],
    room_bytes: int,
) -> bool:
    """Whether a step would fit with other options, if the optimizer has them."""
    if not all(key in optimizer.defaults for key in options):
        return False
    needs = step_needs(optimizer, account.granularity_bytes, options, skipped)
    return needs is not None and _taken_bytes(needs, account) <= room_bytes


def _text(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
