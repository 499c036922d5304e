"""The models of Sekiyama et al. 2018, section 5, that the zoo does not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["InceptionResNet", "Translator", "alexnet"]


def alexnet(classes: int = 1000) -> nn.Module:
    """Five convolutions and three linear layers (Krizhevsky et al. 2012), in one column."""
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(6),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * 36, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, classes),
    )


def _convolution(
    inputs: int, outputs: int, size: int | tuple[int, int], stride: int = 1, padding: int = -1
) -> nn.Module:
    """Return a convolution with BatchNorm and ReLU; padding -1: the size of the map stays."""
    height, width = (size, size) if isinstance(size, int) else size
    around = (height // 2, width // 2) if padding < 0 else (padding, padding)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, (height, width), stride, around, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class _Residual(nn.Module):
    """Branches side by side, joined by a 1x1 convolution, and added to the input."""

    def __init__(self, channels: int, branches: Sequence[nn.Module], joined: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.join = nn.Conv2d(joined, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + 0.2 * self.join(torch.cat([branch(x) for branch in self.branches], 1)))


class _Reduction(nn.Module):
    """Branches side by side that halve the map, concatenated with the pooled input."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*(branch(x) for branch in self.branches), F.max_pool2d(x, 3, 2)], 1)


class InceptionResNet(nn.Module):
    """Inception blocks with residual connections (Szegedy et al. 2016, version 1).

    Parameters
    ----------
    blocks : tuple of int
        How many blocks of each of the three kinds.
    """

    def __init__(self, blocks: tuple[int, int, int] = (5, 10, 5), classes: int = 1000) -> None:
        super().__init__()
        c = _convolution
        stem = [c(3, 32, 3, 2, 0), c(32, 32, 3, 1, 0), c(32, 64, 3), nn.MaxPool2d(3, 2)]
        stem += [c(64, 80, 1), c(80, 192, 3, 1, 0), c(192, 256, 3, 2, 0)]
        first = [self._first() for _ in range(blocks[0])]
        second = [self._second() for _ in range(blocks[1])]
        third = [self._third() for _ in range(blocks[2])]
        reduction = _Reduction(
            [
                c(256, 384, 3, 2, 0),
                nn.Sequential(c(256, 192, 1), c(192, 192, 3), c(192, 256, 3, 2, 0)),
            ]
        )
        last_reduction = _Reduction(
            [
                nn.Sequential(c(896, 256, 1), c(256, 384, 3, 2, 0)),
                nn.Sequential(c(896, 256, 1), c(256, 256, 3, 2, 0)),
                nn.Sequential(c(896, 256, 1), c(256, 256, 3), c(256, 256, 3, 2, 0)),
            ]
        )
        self.body = nn.Sequential(*stem, *first, reduction, *second, last_reduction, *third)
        self.head = nn.Linear(1792, classes)

    @staticmethod
    def _first() -> nn.Module:
        c = _convolution
        branches = [
            c(256, 32, 1),
            nn.Sequential(c(256, 32, 1), c(32, 32, 3)),
            nn.Sequential(c(256, 32, 1), c(32, 32, 3), c(32, 32, 3)),
        ]
        return _Residual(256, branches, 96)

    @staticmethod
    def _second() -> nn.Module:
        c = _convolution
        tall = nn.Sequential(c(896, 128, 1), c(128, 128, (1, 7)), c(128, 128, (7, 1)))
        return _Residual(896, [c(896, 128, 1), tall], 256)

    @staticmethod
    def _third() -> nn.Module:
        c = _convolution
        tall = nn.Sequential(c(1792, 192, 1), c(192, 192, (1, 3)), c(192, 192, (3, 1)))
        return _Residual(1792, [c(1792, 192, 1), tall], 384)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits: [N, 3, H, W] -> [N, classes]."""
        return self.head(self.body(x).mean((2, 3)))


class Translator(nn.Module):
    """An encoder and a decoder of LSTM layers with attention (Luong et al. 2015)."""

    def __init__(self, words: int = 8000, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.read = nn.Embedding(words, width)
        self.written = nn.Embedding(words, width)
        self.encoder = nn.LSTM(width, width, layers, batch_first=True)
        self.decoder = nn.LSTM(width, width, layers, batch_first=True)
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits: source [N, S], target [N, T] -> [N, T, words]."""
        memory, state = self.encoder(self.read(source))
        answer, _ = self.decoder(self.written(target), state)
        weights = torch.softmax(answer @ memory.transpose(1, 2), -1)
        joined = torch.tanh(self.join(torch.cat([answer, weights @ memory], -1)))
        return self.head(joined)
