"""The states of all random generators a step may draw from, to start it again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["GeneratorStates"]


class GeneratorStates:
    """What the generators were when this was made: PyTorch's own and those of modules.

    Kept as plain bytes: tensors would count among what a step holds.

    `modules`: modules whose attributes may be generators.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._cpu = _plain(torch.get_rng_state())
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = [_plain(s) for s in torch.cuda.get_rng_state_all()] if used else []
        self._own = [
            (value, _plain(value.get_state()))
            for top in modules.values()
            for module in top.modules()
            for value in module.__dict__.values()
            if isinstance(value, torch.Generator)
        ]

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(_tensor(self._cpu))
        if self._cuda:
            torch.cuda.set_rng_state_all([_tensor(state) for state in self._cuda])
        for generator, state in self._own:
            generator.set_state(_tensor(state))


def _plain(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
