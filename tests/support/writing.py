"""Models that write into their own tensors, or put others in their place; losses and cells."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.models import PARTLY, SEVERAL, Case


class MaskedLinear(nn.Linear):
    """Masks its weight for good, as the convolutions of PixelCNN do."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x).relu()


class Momentum(nn.Module):
    """A frozen copy follows the trained one, as the key encoder of MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1
        return F.cosine_similarity(self.query(x), self.key(x)).sum()


class Range(nn.Module):
    """Follows the range of its inputs in buffers it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x):
        h = self.linear(x)
        self.largest = torch.max(self.largest, h.data.max())
        return h / self.largest


class Scaled(Range):
    """The same, where its gradient needs what the buffer held before."""

    def forward(self, x):
        h = self.linear(x)
        y = h * self.largest
        self.largest = 0.9 * self.largest + h.detach().abs().max()
        return y


class RangeByData(Range):
    """The same, where data decide how."""

    def forward(self, x):
        h = self.linear(x)
        if h.max() > self.largest:
            self.largest = self.largest + h.data.max()
        return h / self.largest


class UsedThenChanged(nn.Module):
    """Clips a weight that its backward is going to read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.second(self.first(x))
        self.second.weight.data.clamp_(-0.1, 0.1)
        return h


class Speech(nn.Module):
    """A CTC loss whose lengths are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 6)

    def forward(self, x, targets, counts):
        scores = self.scores(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1])
        chosen = targets.masked_select(targets > 0)
        return F.ctc_loss(scores, chosen, lengths, counts, zero_infinity=True)


class Cells(nn.Module):
    """Recurrent cells, whose gates torch computes in slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(8, 16), nn.LSTMCell(16, 16)

    def forward(self, x):
        hidden = x.new_zeros(len(x), 16)
        state = hidden, hidden
        for _ in range(3):
            hidden = self.gru(x, hidden)
            state = self.lstm(hidden, state)
        return state[0].square().sum()


class Matched(nn.Module):
    """Writes where a computed mask and indices say, as detectors do; a determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 8)

    def forward(self, x, classes):
        scores = self.scores(x)
        chosen = scores.sum(1) > 0
        target = torch.zeros_like(scores)
        target[chosen, classes[chosen]] = 1
        loss = F.binary_cross_entropy_with_logits(scores, target)
        return loss - torch.slogdet(self.scores.weight)[1]


class Watched(nn.Module):
    """Leaves weights in an attribute and heads in a list, as deep supervision does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weights: torch.Tensor | None = None
        self.heads = [torch.zeros(1), torch.zeros(1)]

    def forward(self, x):
        self.weights = self.first(x).softmax(-1)
        self.heads[0] = x * self.weights
        self.heads[1] = self.second(self.heads[0]).tanh()
        return torch.stack(self.heads)


def _chain(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), kind(), nn.Linear(8, 8), kind())


def _rows() -> tuple[torch.Tensor]:
    return (torch.randn(6, 8),)


def _speech() -> tuple[torch.Tensor, ...]:
    targets = torch.tensor([[1, 2, 3], [4, 0, 0]])
    return torch.randn(2, 10, 8), targets, torch.tensor([3, 1])


def _renormed() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 8))


WRITING = (
    Case("weights masked in forward", lambda: _chain(MaskedLinear), _rows, torch.sum),
    Case("embeddings with `max_norm`", _renormed, lambda: (torch.arange(12) % 20,), torch.sum),
    Case("weights clipped after their use", UsedThenChanged, _rows, torch.sum),
    Case("averages of weights kept by forward", Momentum, _rows),
    Case("buffers that forward replaces", lambda: _chain(Range), _rows, torch.sum),
    Case("buffers read, then replaced", lambda: _chain(Scaled), _rows, torch.sum),
    Case(
        "buffers replaced where data decide",
        lambda: _chain(RangeByData),
        _rows,
        torch.sum,
        where=PARTLY,
    ),
    Case("tensors left in attributes and lists", Watched, _rows, torch.sum),
    Case("CTC losses", Speech, _speech, where=SEVERAL),
    Case("recurrent cells", Cells, lambda: (torch.randn(6, 8),)),
    Case(
        "targets put by masks, determinants",
        Matched,
        lambda: (*_rows(), torch.arange(6)),
        where=SEVERAL,
    ),
)
