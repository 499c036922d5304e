"""Ops that name their memory and time themselves: they are not measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightfit.costs.measured.call import Measurement

_BYTES_PER_S = 5e9  # that an op reads and writes, until steps have been timed


@dataclass(frozen=True)
class PredictedOp:
    """The function of an op that names its memory itself."""

    workspace_bytes: int  # memory it takes and gives back while it runs
    moved_bytes: int  # bytes it reads and writes

    def measure(self, *, briefly: bool = False) -> Measurement:
        """Return its memory, predicted; its time is learned from steps."""
        return Measurement(
            cost_s=self.moved_bytes / _BYTES_PER_S,
            workspace_bytes=self.workspace_bytes,
            output_bytes=(),
            output_strides=(),
            aliases=(),
            none_outputs=(),
        )


@dataclass(frozen=True)
class TakenOver(PredictedOp):
    """Returns a tensor as it is, under another name."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass(frozen=True)
class Copied(PredictedOp):
    """Returns a copy of a tensor, laid out alike."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()
