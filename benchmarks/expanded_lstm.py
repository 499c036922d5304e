"""An LSTM whose steps read a slice each of expanded weights, for planners that copy operators.

A weight that many steps read has its gradients added up in place, which the planners of the papers
and the eviction policies do not take on a static graph. Here the slices' gradients are stacked and
summed once; values and gradients are those of the usual LSTM.
"""

from __future__ import annotations

import torch
from torch import nn

from tightfit.zoo.example import Example

__all__ = ["expanded_lstm"]


class ExpandedLSTM(nn.Module):
    """An LSTM over [T, N, I]: its loss is the mean square of the last hidden state."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs + hidden, 4 * hidden) / hidden**0.5)

    def forward(self, x):
        times, batch, inputs = x.shape
        weights = self.weight.expand(times, *self.weight.shape).unbind()
        hidden = cell = x.new_zeros(batch, self.weight.shape[0] - inputs)
        for now, weight in zip(x, weights, strict=True):
            gates = torch.cat([now, hidden], 1) @ weight
            enter, forget, content, leave = gates.chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * content.tanh()
            hidden = leave.sigmoid() * cell.tanh()
        return hidden.square().mean()


def expanded_lstm(batch: int = 512, sequence: int = 10) -> Example:
    """Return the LSTM, 64 wide, on a batch of sequences."""
    model = ExpandedLSTM(64, 64)
    return Example(model.train(), None, (torch.randn(sequence, batch, 64),), None)
