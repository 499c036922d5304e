"""One limit for several fitted models and steps."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from tightfit.api.constants import lasting_bytes
from tightfit.errors import BadInput
from tightfit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tightfit.api.options import Options
    from tightfit.api.session import Session
    from tightfit.graph.ir import Graph

__all__ = ["Budget", "close_windows", "limit_bytes"]


class Budget:
    """A memory budget that several fitted models share: a GAN, a student and its teacher.

    What every member holds the whole time (parameters, buffers, gradients, optimizer state) is
    set aside; what is left for activations is divided equally, because one member's forward may
    be open while another one runs.

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

    def share_bytes(self) -> int:
        """Return each member's part of what is left for activations."""
        lasting = sum(
            lasting_bytes(member.options.optimizer, member.modules, expected=True)
            for member in self._members
        )
        return max(0, self.size_bytes - lasting) // max(1, len(self._members))


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
    if graph.device.kind == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_allocated()
    raise BadInput(
        "budget='device' needs a device with memory of its own (CUDA); on a CPU give bytes, such "
        "as budget='8GiB'"
    )
