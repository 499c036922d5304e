"""One limit for several fitted models and steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from tightfit.errors import BadInput
from tightfit.plan.plan import Gradients
from tightfit.session.memory.account import Account, expected_bytes_of, lasting_bytes_of
from tightfit.units import format_bytes, parse_bytes

__all__ = ["Budget", "Needs", "Share", "divided", "usable_bytes"]


_Kind: TypeAlias = tuple[Gradients, bool]
"""How gradients are handed over, and whether all of them exist before."""


class Member(Protocol):
    """A fitted callable that shares a budget."""

    @property
    def waiting(self) -> Sequence[Any]:
        """Calls that await their backward."""
        ...

    def close_step(self) -> Any:
        """End the measured step."""
        ...


class Budget:
    """A memory budget that several fitted models share: a GAN, a student and its teacher.

    What is held when a member is called is known, and the rest of the budget is its own: members
    that take turns need no shares. Where one member is called between another one's forward and
    backward, the outer one leaves room: what both can do with is known from their first calls,
    which run the plans that hold least.

    Parameters
    ----------
    size : int or str
        Bytes, or text such as ``"8GiB"``.

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
        self._needs: weakref.WeakKeyDictionary[Account, dict[_Kind, Needs]] = (
            weakref.WeakKeyDictionary()
        )
        self._inside: weakref.WeakKeyDictionary[Account, weakref.WeakKeyDictionary[Account, int]]
        self._inside = weakref.WeakKeyDictionary()
        self._has_closed = False

    def __repr__(self) -> str:
        return f"Budget({format_bytes(self.size_bytes)}, {len(self._members)} members)"

    def join(self, account: Account, member: Member) -> None:
        """Count a fitted callable, with what it holds, among those that share the budget."""
        if self._members:
            gc.collect()  # those that were let go of count no longer
        self._members[account] = weakref.ref(member)

    def leave(self, account: Account) -> None:
        """No longer count a fitted callable."""
        self._members.pop(account, None)

    def members(self) -> list[Account]:
        """Return what those hold that share the budget."""
        return list(self._members)

    def others(self, account: Account) -> list[Account]:
        """Return what the other members hold."""
        return [member for member in self._members if member is not account]

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

    @property
    def has_closed(self) -> bool:
        """Whether all calls of members have had their backward at least once.

        Until then nobody knows how many there are before one.
        """
        return self._has_closed

    def closes(self) -> None:
        """Note that no call of a member awaits its backward any more."""
        self._has_closed = True

    def begins(self, account: Account) -> None:
        """Note that a member is called, maybe while others await their backward."""
        open_calls = self.open_members()
        for other in open_calls:
            if other is not account:
                self._comes_inside(other, account, open_calls.get(account, 0) + 1)

    def _comes_inside(self, outer: Account, inner: Account, calls: int) -> None:
        known = self._inside.setdefault(outer, weakref.WeakKeyDictionary())
        known[inner] = max(calls, known.get(inner, 0))

    def declare(self, account: Account, gradients: Gradients, needs: Needs) -> None:
        """Note what a member's plans can do with, for new gradients or for those that exist."""
        self._needs.setdefault(account, {})[_kind_of(account, gradients)] = needs

    def knows(self, account: Account, gradients: Gradients | None = None) -> bool:
        """Whether it is known what a member's plans can do with; None: for any gradients."""
        known = self._needs.get(account, {})
        return bool(known) if gradients is None else _kind_of(account, gradients) in known

    def _needs_of(self, account: Account) -> Needs:
        """Return the most of what a member's plans need."""
        known = self._needs[account].values()
        return Needs(
            least_peak=max(needs.least_peak for needs in known),
            least_kept=max(needs.least_kept for needs in known),
            most_peak=max(needs.most_peak for needs in known),
            most_kept=max(needs.most_kept for needs in known),
        )

    def share_of(self, account: Account, calls: int, waiting_bytes: int) -> Share | None:
        """Return what a call of a member may hold besides what lasts; None: all that is there.

        Parameters
        ----------
        account : Account
            What the member holds.
        calls : int
            How many calls of it there are before a backward.
        waiting_bytes : int
            What gradients of another one of them take until both are added up.
        """
        inside = {m: n for m, n in self._inside.get(account, {}).items() if m in self._members}
        if not inside:
            return None
        members = self.members()
        lasting = lasting_bytes_of(members) + expected_bytes_of(members) + waiting_bytes
        room = max(0, self.size_bytes - lasting)
        if not all(map(self.knows, (account, *inside))):
            return Share(room // (calls + sum(inside.values())))
        needs = [self._needs_of(member) for member, calls in inside.items() for _ in range(calls)]
        own = self._needs_of(account)
        return divided(room, [*[own] * calls, *needs], own)

    def least_bytes(self, account: Account) -> int:
        """Return a size that has room for the open calls, one more of a member, and as many again.

        0 if none is open. Members that were not called yet may need more.
        """
        calls = self.open_members()
        if not calls:
            return 0
        calls[account] = calls.get(account, 0) + 1
        for inner, most in self._inside.get(account, {}).items():
            calls[inner] = max(most, calls.get(inner, 0))
        needs = {member: self._needs_of(member) for member in calls if self.knows(member)}
        members = self.members()
        lasting = lasting_bytes_of(members)
        keeper = account.keeper
        beside = max(0, keeper.held_bytes() - lasting) if keeper is not None else 0
        waiting = max((m.new_gradient_bytes() + m.gradient_bytes() for m in needs), default=0)
        working = max((each.working_bytes for each in needs.values()), default=0)
        to_come = sum((calls[m] + (m is account)) * n.least_kept for m, n in needs.items())
        return lasting + expected_bytes_of(members) + beside + waiting + working + to_come


def _kind_of(account: Account, gradients: Gradients) -> _Kind:
    return gradients, account.new_gradient_bytes() == 0


@dataclass(frozen=True)
class Needs:
    """What plans of a step hold, in bytes: its inputs too, but not what lasts or new gradients.

    Parameters
    ----------
    least_peak, least_kept : int
        The peak of the least-memory plan, and what it keeps between forward and backward.
    most_peak, most_kept : int
        The same of the plan that keeps everything.
    """

    least_peak: int
    least_kept: int
    most_peak: int
    most_kept: int

    @property
    def working_bytes(self) -> int:
        """The most that a forward or a backward holds besides what is kept."""
        return max(self.least_peak - self.least_kept, self.most_peak - self.most_kept)


@dataclass(frozen=True)
class Share:
    """One member's part of a shared budget.

    Parameters
    ----------
    peak_bytes : int
        What it may hold besides what lasts.
    others_bytes : int
        What the others may hold between its forward and its backward.
    part : float
        What it would have of each further byte of the budget, at least.
    """

    peak_bytes: int
    others_bytes: int = 0
    part: float = 1.0


def divided(room_bytes: int, needs: Sequence[Needs], own: Needs) -> Share:
    """Return the share of one of several steps that run inside each other.

    Each step works beside what all others keep for their backward. What the largest working set
    leaves is divided among what is kept: the least of each, and of the rest in proportion to what
    more it could keep.
    """
    working = max(n.working_bytes for n in needs)
    spare = room_bytes - working - sum(n.least_kept for n in needs)
    spans = sum(n.most_kept - n.least_kept for n in needs)
    part = min(1.0, max(0, spare) / spans) if spans > 0 else 0.0
    kept = [n.least_kept + int(part * (n.most_kept - n.least_kept)) for n in needs]
    mine = own.least_kept + int(part * (own.most_kept - own.least_kept))
    others = max(0, room_bytes - sum(kept))
    further = (own.most_kept - own.least_kept) / spans if spans > 0 and part < 1.0 else 1.0
    return Share(peak_bytes=others + mine, others_bytes=others, part=further or 1.0)


def usable_bytes(budget_bytes: int, reserve_bytes: int) -> int:
    """Return what a reserve leaves of a budget.

    Raises
    ------
    BadInput
        If that is nothing.
    """
    if reserve_bytes >= budget_bytes:
        raise BadInput(
            f"the reserve of {format_bytes(reserve_bytes)} leaves nothing of the budget of "
            f"{format_bytes(budget_bytes)}"
        )
    return budget_bytes - reserve_bytes
