"""Calls of which it is known that they have nothing to train: they run plainly."""

from __future__ import annotations

from typing import Any

import torch

from tightfit.capture.calls.structure import flatten
from tightfit.errors import NothingToTrain

__all__ = ["Untrained"]


class Untrained:
    """The signatures of calls none of whose outputs needs a gradient, each with the reason."""

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}

    def note(self, key: Any, reason: NothingToTrain) -> None:
        """Note a call that was found to have nothing to train."""
        self._known[key] = str(reason)

    def refuse(self, key: Any) -> None:
        """Refuse to plan such a call.

        Raises
        ------
        NothingToTrain
            As when it was found out.
        """
        if key in self._known:
            raise NothingToTrain(self._known[key])

    def looked_at(self, output: Any) -> Any:
        """Return what such a call has returned; if it needs a gradient after all, forget them."""
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in flatten(output)[0]):
            self._known.clear()
        return output
