"""One limit for several fitted models and steps."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

import torch

from tightfit.api.constants import lasting_bytes, new_gradient_bytes
from tightfit.errors import BadInput
from tightfit.execution.guard import announce
from tightfit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tightfit.api.options import Options
    from tightfit.api.ranks import Ranks
    from tightfit.api.session import Session
    from tightfit.graph.ir import Graph

__all__ = ["Budget", "close_windows", "device_bytes", "limit_bytes", "share_bytes", "with_ranks"]


class Budget:
    """A memory budget that several fitted models share: a GAN, a student and its teacher.

    What every member holds the whole time (parameters, buffers, gradients, optimizer state) is
    set aside; what is left for activations is divided, because one member's forward may be open
    while another one runs: equally, or by what each member is known to need.

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
        self._members: weakref.WeakSet[Session] = weakref.WeakSet()
        self._needs: weakref.WeakKeyDictionary[Session, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )

    def __repr__(self) -> str:
        return f"Budget({format_bytes(self.size_bytes)}, {len(self._members)} members)"

    def join(self, session: Session) -> None:
        """Count a fitted callable among those that share the budget."""
        self._members.add(session)

    def leave(self, session: Session) -> None:
        """No longer count a fitted callable."""
        self._members.discard(session)

    def members(self) -> list[Session]:
        """Return those that share the budget."""
        return list(self._members)

    def limit_bytes(self, session: Session) -> int:
        """Return what a member's step may hold, now that the others hold what they hold."""
        return self.size_bytes - sum(
            lasting_bytes(other.options.optimizer, other.modules, expected=False)
            for other in self._members
            if other is not session
        )

    def declare(self, session: Session, least_bytes: int, most_bytes: int) -> None:
        """Note between which bytes a member's activations can be planned."""
        self._needs[session] = least_bytes, max(least_bytes, most_bytes)

    def share_bytes(self, session: Session) -> int:
        """Return a member's part of what is left for activations.

        Where every member's needs are known, each gets its least, and of the rest in proportion
        to what it could save by recomputing.
        """
        members = self.members()
        lasting = sum(
            lasting_bytes(member.options.optimizer, member.modules, expected=True)
            for member in members
        )
        room = max(0, self.size_bytes - lasting)
        needs = [self._needs[member] for member in members if member in self._needs]
        if len(needs) < len(members) or session not in self._needs:
            return room // max(1, len(members))
        least, most = self._needs[session]
        all_least = sum(each[0] for each in needs)
        spans = sum(each[1] - each[0] for each in needs)
        if room < all_least:
            return room * least // all_least
        return least + (room - all_least) * (most - least) // max(1, spans)


def close_windows(session: Session) -> None:
    """End the measured steps of a session and of those that share its budget."""
    shared = session.options.shared
    for member in shared.members() if shared is not None else [session]:
        member.close_step()


def limit_bytes(options: Options, session: Session, graph: Graph) -> int:
    """Return the bytes a step may hold: given, shared with others, or what a device has free."""
    if options.shared is not None:
        return options.shared.limit_bytes(session)
    if options.budget_bytes is not None:
        return options.budget_bytes
    session.options = dataclasses.replace(
        options, budget_bytes=device_bytes(graph.device.kind, options.ranks)
    )
    return session.options.budget_bytes


def share_bytes(session: Session, graph: Graph, constant_bytes: int) -> int:
    """Return the budget of one of the calls that may be open at once."""
    budget_bytes, options = session.budget_bytes(graph), session.options
    if options.shared is not None:
        new = new_gradient_bytes(session.modules, graph.device.granularity_bytes)
        share = options.shared.share_bytes(session) // options.in_flight
        return min(budget_bytes, constant_bytes + new + share)
    if budget_bytes <= constant_bytes:
        return budget_bytes
    return constant_bytes + (budget_bytes - constant_bytes) // options.in_flight


def device_bytes(kind: str, ranks: Ranks | None = None) -> int:
    """Return what a device has free now, for this process: on the rank that has the least."""
    if kind != "cuda":
        raise BadInput(
            "budget='device' needs a device with memory of its own (CUDA); on a CPU give bytes, "
            "such as budget='8GiB'"
        )
    free, _ = torch.cuda.mem_get_info()
    own = free + torch.cuda.memory_reserved()
    return own if ranks is None else min(ranks.gather("free", own))


def with_ranks(options: Options, ranks: Ranks) -> Options:
    """Return the options for several ranks, which all keep to the least budget among them.

    Raises
    ------
    BadInput
        If the ranks were given different shared budgets or reserves.
    """
    sizes = ranks.gather("budget", options.budget_bytes or 0)
    reserves = ranks.gather("reserve", options.reserve_bytes)
    if len(set(reserves)) > 1 or (options.shared is not None and len(set(sizes)) > 1):
        raise BadInput(
            f"the ranks ask for different things: budgets of {_listed(sizes)}, reserves of "
            f"{_listed(reserves)}. Give every rank the same"
        )
    least = min(sizes)
    if options.budget_bytes != least and least:
        announce(f"the least budget of {ranks.size} ranks counts: {format_bytes(least)}")
    return dataclasses.replace(options, budget_bytes=least or None, ranks=ranks)


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(format_bytes, sizes))
