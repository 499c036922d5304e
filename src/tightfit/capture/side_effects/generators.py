"""The states of all random generators a step may draw from, to start it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn


def generators_of(modules: Mapping[str, nn.Module]) -> list[torch.Generator]:
    """Return the generators among the attributes of modules and inside of these."""
    return [
        value
        for top in modules.values()
        for module in top.modules()
        for value in module.__dict__.values()
        if isinstance(value, torch.Generator)
    ]


class GeneratorStates:
    """The states that generators had when this was made: PyTorch's own and others.

    Kept as plain bytes: tensors would count among the bytes of a step.
    """

    def __init__(self, others: Iterable[torch.Generator] = ()) -> None:
        self._cpu = _plain(torch.get_rng_state())
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = [_plain(s) for s in torch.cuda.get_rng_state_all()] if used else []
        self._others = [(each, _plain(each.get_state())) for each in others]

    def restore(self) -> None:
        torch.set_rng_state(_tensor(self._cpu))
        if self._cuda:
            torch.cuda.set_rng_state_all([_tensor(state) for state in self._cuda])
        for generator, state in self._others:
            generator.set_state(_tensor(state))


def _plain(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
