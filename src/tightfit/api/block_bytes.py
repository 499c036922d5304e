"""What a model that is planned block by block holds besides its activations, and may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tightfit.api.constants import gradient_bytes, optimizer_state_bytes, resident_tensor_bytes
from tightfit.capture.capture import granularity_of
from tightfit.errors import BadInput, CaptureError

if TYPE_CHECKING:
    from tightfit.api.session import Session

__all__ = ["BlockBytes"]


class BlockBytes:
    """The budget of a session and its lasting memory.

    Parameters
    ----------
    session : Session
        Whose blocks are planned one by one.
    reason : CaptureError
        Why they are.
    """

    def __init__(self, session: Session, reason: CaptureError) -> None:
        self.session = session
        self.reason = reason
        parameters = (p for m in session.modules.values() for p in m.parameters())
        self.device = next(parameters).device.type
        self.granularity = granularity_of(self.device)

    @property
    def budget(self) -> int:
        """The budget without the reserve.

        Raises
        ------
        BadInput
            If it is shared with others, or what the device has free.
        """
        options = self.session.options
        if options.shared is not None or options.budget_bytes is None:
            raise BadInput(
                f"{self.session.name} can only be planned block by block, which takes a budget of "
                f"its own in bytes: {self.reason}"
            )
        return options.budget_bytes - options.reserve_bytes

    @property
    def usable(self) -> int:
        """The budget without the optimizer state that will exist once it has stepped."""
        session = self.session
        if self._state() or session.seen_state_bytes is not None:
            return self.budget
        optimizer = session.options.optimizer
        state = optimizer_state_bytes(optimizer, session.modules, self.granularity, self.device)
        return self.budget - state

    def constant(self, leaves: list[Any]) -> int:
        """Return what is resident now: parameters, buffers, inputs, gradients, optimizer state."""
        modules = self.session.modules
        tensors = [t for m in modules.values() for t in (*m.parameters(), *m.buffers())]
        tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        held = resident_tensor_bytes(tensors, self.granularity)
        return held + gradient_bytes(modules, self.granularity) + self._state()

    def _state(self) -> int:
        """Return the optimizer state that exists."""
        session = self.session
        optimizer = session.options.optimizer
        if optimizer is None:
            return session.seen_state_bytes or 0
        if not any(optimizer.state.values()):
            return 0
        return optimizer_state_bytes(optimizer, session.modules, self.granularity, self.device)
