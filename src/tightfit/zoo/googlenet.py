"""GoogLeNet (Szegedy et al., 2015) with BatchNorm, without auxiliary heads.

As torchvision does, the branch that the paper gives a 5x5 convolution has a 3x3 one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tightfit.zoo.example import (
    Example,
    ImageSize,
    classification,
    height_and_width,
    initialise_convolutions,
)

# name: (1x1, reduction before 3x3, 3x3, reduction before "5x5", "5x5", after the pooling)
_BLOCKS: dict[str, tuple[int, int, int, int, int, int]] = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width, eps=0.001),
        nn.ReLU(inplace=True),
    )


class Inception(nn.Module):
    """Four branches side by side, concatenated: [N, C, H, W] -> [N, sum of widths, H, W]."""

    def __init__(self, channels: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pooled = widths
        self.branch1 = _convolution(channels, one, 1)
        self.branch2 = nn.Sequential(
            _convolution(channels, reduce3, 1), _convolution(reduce3, three, 3)
        )
        self.branch3 = nn.Sequential(
            _convolution(channels, reduce5, 1), _convolution(reduce5, five, 3)
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, 1, padding=1, ceil_mode=True), _convolution(channels, pooled, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(nn.Module):
    """A stem and nine inception blocks: [N, 3, H, W] -> [N, classes]."""

    def __init__(self, dropout: float = 0.2, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, 64, 7, 2),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            _convolution(64, 64, 1),
            _convolution(64, 192, 3),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        self.blocks = nn.Sequential()
        channels = 192
        for name, widths in _BLOCKS.items():
            if name == "4a":
                self.blocks.add_module("pool3", nn.MaxPool2d(3, 2, ceil_mode=True))
            if name == "5a":
                self.blocks.add_module("pool4", nn.MaxPool2d(2, 2, ceil_mode=True))
            self.blocks.add_module(f"inception{name}", Inception(channels, widths))
            channels = widths[0] + widths[2] + widths[4] + widths[5]
        self.average = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)
        initialise_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.average(self.blocks(self.stem(images))).flatten(1)
        return self.fc(self.dropout(x))


def googlenet(batch: int, size: ImageSize, dropout: float) -> Example:
    """Return GoogLeNet with images of `size` pixels; cross-entropy outside the model."""
    return classification(GoogLeNet(dropout), batch, height_and_width(size))
