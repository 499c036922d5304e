"""One limit for several fitted models and steps."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tightfit.errors import BadInput
from tightfit.session.memory.account import device_of_modules, lasting_bytes, new_gradient_bytes
from tightfit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tightfit.graph.ir import Graph
    from tightfit.session.processes import Ranks
    from tightfit.session.whole.steps import Session

__all__ = [
    "Budget",
    "Needs",
    "Share",
    "close_windows",
    "divided",
    "limit_bytes",
    "share_of",
    "usable_bytes",
]


class Budget:
    """A memory budget that several fitted models share: a GAN, a student and its teacher.

    What every member holds the whole time (parameters, buffers, gradients, optimizer state) is
    set aside; what is left for activations is divided, because one member's forward may be open
    while another one runs: equally, or, where the needs of all members are known, so that each
    finds room for its own peak beside what the others keep for backward.

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
        self._needs: weakref.WeakKeyDictionary[Session, Needs] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"Budget({format_bytes(self.size_bytes)}, {len(self._members)} members)"

    def join(self, session: Session) -> None:
        """Count a fitted callable among those that share the budget."""
        if self._members:
            gc.collect()  # those that were let go of count no longer
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

    def declare(self, session: Session, needs: Needs) -> None:
        """Note what a member's plans can do with."""
        self._needs[session] = needs

    def knows(self, session: Session) -> bool:
        """Whether the needs of all members are known, and those of this one."""
        return all(member in self._needs for member in (session, *self._members))

    def share_of(self, session: Session) -> Share:
        """Return a member's part of what is left for activations."""
        members = self.members()
        lasting = sum(
            lasting_bytes(member.options.optimizer, member.modules, expected=True)
            for member in members
        )
        room = max(0, self.size_bytes - lasting)
        if not self.knows(session):
            return Share(room // max(1, len(members)))
        return divided(room, [self._needs[member] for member in members], self._needs[session])


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


@dataclass(frozen=True)
class Share:
    """One member's part of a shared budget.

    Parameters
    ----------
    peak_bytes : int
        What it may hold besides what lasts.
    others_bytes : int
        What the others may hold between its forward and its backward.
    """

    peak_bytes: int
    others_bytes: int = 0


def divided(room_bytes: int, needs: Sequence[Needs], own: Needs) -> Share:
    """Return the share of one of several steps that run inside each other.

    Each step works beside what all others keep for their backward. What the largest working set
    leaves is divided among what is kept: the least of each, and of the rest in proportion to what
    more it could keep.
    """
    working = max(max(n.least_peak - n.least_kept, n.most_peak - n.most_kept) for n in needs)
    spare = room_bytes - working - sum(n.least_kept for n in needs)
    spans = sum(n.most_kept - n.least_kept for n in needs)
    part = min(1.0, max(0, spare) / spans) if spans > 0 else 0.0
    kept = [n.least_kept + int(part * (n.most_kept - n.least_kept)) for n in needs]
    mine = own.least_kept + int(part * (own.most_kept - own.least_kept))
    others = max(0, room_bytes - sum(kept))
    return Share(peak_bytes=others + mine, others_bytes=others)


def close_windows(session: Session) -> None:
    """End the measured steps of a session and of those that share its budget."""
    shared = session.options.shared
    for member in shared.members() if shared is not None else [session]:
        member.close_step()


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


def limit_bytes(session: Session) -> int:
    """Return the bytes a step may hold: given, shared with others, or what a device has free."""
    options = session.options
    if options.shared is not None:
        return options.shared.limit_bytes(session)
    if options.budget_bytes is not None:
        return options.budget_bytes
    session.options = dataclasses.replace(
        options, budget_bytes=_free_bytes(device_of_modules(session.modules), options.ranks)
    )
    return session.options.budget_bytes


def share_of(session: Session, graph: Graph, constant_bytes: int) -> Share:
    """Return the budget of one of the calls that may be open at once, what lasts included."""
    budget_bytes, options = session.budget_bytes(), session.options
    if options.shared is not None:
        new = new_gradient_bytes(session.modules, graph.device.granularity_bytes)
        share = options.shared.share_of(session)
        # needs that are known count inputs: one member's input may be what another one keeps
        counted = graph.constants_bytes["inputs"] if options.shared.knows(session) else 0
        peak_bytes = constant_bytes - counted + new + share.peak_bytes // options.in_flight
        return Share(min(budget_bytes, peak_bytes), share.others_bytes)
    if budget_bytes <= constant_bytes:
        return Share(budget_bytes)
    return Share(constant_bytes + (budget_bytes - constant_bytes) // options.in_flight)


def _free_bytes(device: torch.device, ranks: Ranks | None) -> int:
    """Return what a device has free now, for this process: on the rank that has the least."""
    if device.type != "cuda":
        raise BadInput(
            "budget='device' needs a device with memory of its own (CUDA); on a CPU give bytes, "
            "such as budget='8GiB'"
        )
    free, _ = torch.cuda.mem_get_info(device)
    own = free + torch.cuda.memory_reserved(device)
    return own if ranks is None else min(ranks.gather("free", own))
