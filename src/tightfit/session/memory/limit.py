"""The budget of a callable as a limit that nothing exceeds while it runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tightfit.allocator.refusal_details import RefusalDetails
from tightfit.allocator.refusals import budget_exceeded, is_refusal, likely_further_bytes
from tightfit.allocator.resident import resident_tensor_bytes
from tightfit.errors import InfeasibleBudget, no_plan_fits
from tightfit.session.memory.account import Account
from tightfit.session.memory.optimizers import before_every_step
from tightfit.session.memory.steps import refuse_step, stepping_bytes
from tightfit.session.memory.surroundings import with_slack
from tightfit.units import format_bytes

_LOOKING_BYTES = 16 << 10
"""Room for the states of generators, which looking at a callable puts aside."""


def refuses(account: Account) -> bool:
    """Whether requests above the limit of a callable are refused, not only noticed."""
    limiter = account.limiter
    if limiter is None or limiter.tally is None or limiter.limit_bytes is None:
        return False
    return limiter.tally.refuses and limiter.held_bytes() <= limiter.limit_bytes


def name_budget(account: Account, needed_bytes: int) -> bool:
    """Have errors of refused requests name a budget; return whether requests are refused.

    `needed_bytes`: of a step; 0: nothing is known of it. The optimizer's may need more.
    """
    limiter = account.limiter
    if limiter is None or limiter.tally is None or not refuses(account):
        return False
    if needed_bytes:
        needed_bytes = max(needed_bytes, with_slack(stepping_bytes(account)))
    limiter.tally.describe_refusals(RefusalDetails(budget_bytes=needed_bytes))
    return True


def raising(error: InfeasibleBudget) -> AbstractContextManager[None]:
    """Raise an error where the limit refuses a request."""
    return _refusals_as(lambda _: error)


def at_most_held(account: Account, counted_bytes: int) -> int:
    """Return bytes counted tensor by tensor, or those held within the limit if these are fewer.

    Sizes of tensors are rounded up; what the limit counts is exact.
    """
    limiter = account.limiter
    held_bytes = limiter.held_bytes() if limiter is not None else 0
    return min(counted_bytes, held_bytes) if held_bytes else counted_bytes


class Limit:
    """Has the allocator refuse requests above a budget; raises errors in terms of a call.

    `needs`: tells the least budget for steps like the last, as far as that is known. `is_copy`:
    whether the user has not asked for it: a copy keeps to nothing of its own until it trains.
    """

    def __init__(
        self,
        name: str,
        account: Account,
        needs: weakref.WeakMethod[Callable[[], int]],
        *,
        is_copy: bool = False,
    ) -> None:
        self._name = name
        self._needs = needs
        self._account = account
        self._is_enforced = not is_copy
        self._is_looking = False
        self._has_stepped = False  # an optimizer of the model, within the call
        before_every_step(self)

    def follow(self, limit_bytes: int | None, sharing: Sequence[Account]) -> None:
        """Keep to another limit; None: to none."""
        self._account.set_limit(limit_bytes if self._is_enforced else None, sharing)

    def begin(
        self, limit_bytes: int | None, sharing: Sequence[Account], *, is_looking: bool = False
    ) -> None:
        """Enforce the limit: a call begins.

        `limit_bytes`, `sharing`: as in `follow`. `is_looking`: whether nothing of it is planned
        yet.
        """
        self._is_looking = is_looking
        is_asked = limit_bytes is not None or bool(sharing)
        if not self._is_enforced or (is_asked and self._account.limit_bytes is None):
            self._is_enforced = True
            # Of those that share it through the account called last
            self.follow(limit_bytes, sharing)
        self._account.enforce()

    def refuse_below_parameters(self, budget_bytes: int) -> None:
        """Refuse a budget below the bytes of parameters and buffers: nothing need be captured.

        Raises `InfeasibleBudget`, which names the bytes that are certain to be held; saved
        activations come on top.
        """
        account = self._account
        modules = account.modules.values()
        members = (t for m in modules for t in (*m.parameters(), *m.buffers()))
        own = [t for t in members if t.device.type == account.device.type]
        least_bytes = resident_tensor_bytes(own, account.granularity_bytes)
        if least_bytes <= budget_bytes:
            return
        needed_bytes = stepping_bytes(account)
        budget = f"the budget of {format_bytes(budget_bytes)}"
        raise InfeasibleBudget(
            f"{no_plan_fits(self._name, budget, proven=True)}"
            f"\n  least     parameters and buffers take {least_bytes} bytes "
            f"({format_bytes(least_bytes)}) by themselves; proven: none fits less than "
            f"{least_bytes} ({format_bytes(least_bytes)})\n  try       more than {needed_bytes} "
            f"bytes ({format_bytes(needed_bytes)}): with gradients and the optimizer's state; "
            "saved activations come on top. Or a smaller model, or an optimizer with less state",
            budget_bytes=budget_bytes,
            minimum_bytes=needed_bytes,
            proven=True,
        )

    @contextlib.contextmanager
    def without_backward(
        self, limit_bytes: int | None, sharing: Sequence[Account], *, goes_on: bool
    ) -> Iterator[None]:
        """Enforce the limit while something runs that has no backward.

        `limit_bytes`, `sharing`: as in `begin`. `goes_on`: whether a step is running afterwards,
        too: a backward is awaited.
        """
        if self._is_enforced:
            self.begin(limit_bytes, sharing)
        message = (
            f"{self._name} was called where no backward can follow, and that needs more than "
            "the budget has room for: nothing is kept, so nothing can be computed again. A "
            "smaller batch helps."
        )
        try:
            with _refused_as(message):
                yield
        finally:
            if self._is_enforced and not goes_on:
                self._account.rest()

    @contextlib.contextmanager
    def outside(self, limit_bytes: int | None, sharing: Sequence[Account]) -> Iterator[None]:
        """Enforce the limit while code runs outside of every plan; raise errors of refusals.

        Parameters are those of `follow`.
        """
        self.begin(limit_bytes, sharing)
        message = (
            f"{self._name} runs outside of every plan here (see its report), where it keeps "
            "all saved tensors of plain PyTorch. That needs more than the budget has room for."
        )
        with _refused_as(message):
            yield

    def __enter__(self) -> None:
        """Begin a call."""
        self._has_stepped = False

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End it; raise an error of a refusal in terms of the budget."""
        if error is None:
            return
        self._account.rest()
        if is_refusal(error):
            state = "as before the call"
            if self._has_stepped:
                state = "as after the optimizer's last step, which was inside the call"
            message = (
                f"{self._name} needs more than the budget has room for, and was stopped before it "
                f"took that; its state is {state}."
            )
            raise budget_exceeded(
                error, message, further_bytes=self._further_bytes(error)
            ) from error

    def _further_bytes(self, error: BaseException) -> int | None:
        """Return the likely further need of the call; None: as for any."""
        if not self._is_looking:
            return None
        return max(_LOOKING_BYTES, likely_further_bytes(error))

    def before_step(self, optimizer: Any) -> None:
        """Refuse the step of an optimizer of this model that would exceed the budget."""
        limiter = self._account.limiter
        optimizers = self._account.optimizers
        if limiter is None or optimizers.steps_in_backward(optimizer):
            return
        if optimizers.note(optimizer):
            self._account.note_step()
            skipped = optimizers.note_gradients(optimizer)
            refuse_step(self._name, self._account, optimizer, skipped, limiter, self._needed_bytes)
            self._has_stepped = True
            self._account.since.step_begins(self._account.gradient_versions)
            makes_state = lambda: self._account.coming_state_bytes() > 0  # noqa: E731
            coming_bytes = limiter.coming_state_within_limit_bytes
            self._account.loop_peaks.step_begins(limiter.held_bytes(), makes_state, coming_bytes)

    def _needed_bytes(self) -> int:
        needs = self._needs()
        return 0 if needs is None else needs()


def _refused_as(message: str) -> AbstractContextManager[None]:
    """Name the code that ran where a limit has refused a request."""
    return _refusals_as(lambda refusal: budget_exceeded(refusal, message))


@contextlib.contextmanager
def _refusals_as(error_for: Callable[[Exception], Exception]) -> Iterator[None]:
    """Raise another error where a limit refuses a request."""
    try:
        yield
    except Exception as refusal:
        if not is_refusal(refusal):
            raise
        raise error_for(refusal) from refusal
