"""One limit for several fitted models and steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tightfit.allocator.tally import Tally
from tightfit.errors import BadInput
from tightfit.session.memory.account import Account
from tightfit.session.step.window import Window
from tightfit.units import format_bytes, parse_bytes


class Member(Protocol):
    """A fitted callable that shares a budget."""

    @property
    def waiting(self) -> Sequence[Any]:
        """Calls that await their backward."""

    def close_step(self) -> Any:
        """End the measured step."""


class Budget:
    """A memory budget that several fitted models share: a GAN, a student and its teacher.

    Bytes held when a member is called are known, and the rest of the budget is its own: members
    that take turns need no shares. Where one member is called between another's forward and
    backward, the outer leaves room: which calls follow each other is known from steps before.
    A call that is new among others runs the plan that holds least.

    Parameters
    ----------
    size : int or str
        Bytes, or text such as ``"8GiB"``.

    Attributes
    ----------
    size_bytes : int
        The same in bytes.
    window : Window
        The step of all members that is running.

    Examples
    --------
    >>> budget = tightfit.Budget("8GiB")
    >>> tightfit.fit(generator, budget, optimizer=first)
    >>> tightfit.fit(critic, budget, optimizer=second)
    """

    def __init__(self, size: int | str) -> None:
        self.size_bytes = parse_bytes(size)
        self._members: weakref.WeakKeyDictionary[Account, weakref.ref[Member]] = (
            weakref.WeakKeyDictionary()
        )
        self.window: Window[Any] = Window()

    def __repr__(self) -> str:
        return f"Budget({format_bytes(self.size_bytes)}, {len(self._members)} members)"

    def join(self, account: Account, member: Member) -> None:
        """Count a fitted callable, with its memory, among those that share the budget."""
        if self._members:
            gc.collect()  # those no longer alive count no longer
        if account not in self._members:
            self.window.forget()
        self._members[account] = weakref.ref(member)

    def leave(self, account: Account) -> None:
        """No longer count a fitted callable."""
        self._members.pop(account, None)
        self.window.forget()

    def members(self) -> list[Account]:
        return list(self._members)

    def others(self, account: Account) -> list[Account]:
        return [member for member in self._members if member is not account]

    def tally(self, device: torch.device) -> Tally | None:
        """Return what counts the bytes allocated since its first member; None: it has none."""
        return next((m.tally for m in self._members if m.device == device), None)

    def close_steps(self) -> None:
        """End the measured steps of all that share the budget."""
        for reference in list(self._members.values()):
            member = reference()
            if member is not None:
                member.close_step()

    def open_members(self) -> dict[Account, int]:
        """Return which members have calls that await their backward, and how many."""
        found = ((account, reference()) for account, reference in list(self._members.items()))
        return {a: len(m.waiting) for a, m in found if m is not None and m.waiting}


def usable_bytes(budget_bytes: int, reserve_bytes: int) -> int:
    """Return the bytes of a budget that a reserve leaves.

    Raises `BadInput` if that is nothing.
    """
    if reserve_bytes >= budget_bytes:
        raise BadInput(
            f"the reserve of {format_bytes(reserve_bytes)} leaves nothing of the budget of "
            f"{format_bytes(budget_bytes)}"
        )
    return budget_bytes - reserve_bytes
