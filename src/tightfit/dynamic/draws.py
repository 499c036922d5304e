"""The states of random generators before operators draw from them."""

from __future__ import annotations

from typing import Any

import torch

from tightfit.allocator.devices import default_generator
from tightfit.dynamic.contents import tensors_in
from tightfit.dynamic.room import Room

Drawn = tuple[torch.Generator, torch.Tensor]
"""A generator, and its state before something is drawn."""


class Draws:
    """Reads states; states alike are kept once."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._last_state: torch.Tensor | None = None

    def state_before(self, args: Any, kwargs: Any) -> Drawn:
        """Return the generator that a call is about to draw from, and its state."""
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        generator = given[0] if given else _default_generator(args, kwargs)
        state = self._room.in_room(generator.get_state)
        if self._last_state is not None and torch.equal(state, self._last_state):
            state = self._last_state
        self._last_state = state
        return generator, state


def _default_generator(args: Any, kwargs: Any) -> torch.Generator:
    """Return the generator of a call that is given none: that of its device."""
    tensors = tensors_in([*args, *kwargs.values()])
    device = kwargs.get("device") or torch.get_default_device()
    device = tensors[0].device if tensors else torch.device(device)
    return default_generator(device)
