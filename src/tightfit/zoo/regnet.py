"""RegNetX (Radosavovic et al., 2020): widths of blocks follow from five numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, nn

from tightfit.zoo.example import (
    Example,
    ImageSize,
    classification,
    height_and_width,
    initialise_convolutions,
)

_STEM = 32
_MULTIPLE = 8


@dataclass(frozen=True)
class Widths:
    """The five numbers of a model (section 3.3)."""

    depth: int  # in blocks
    first: int  # channels at the start of the line
    slope: float  # channels that each block adds to it
    factor: float  # between the channels of consecutive stages
    group: int  # channels of a group; each width is a multiple of it

    def of_blocks(self) -> list[int]:
        """Return the channels of each block: a line, rounded to powers of the factor."""
        widths = []
        for block in range(self.depth):
            power = round(math.log((self.first + self.slope * block) / self.first, self.factor))
            width = _MULTIPLE * round(self.first * self.factor**power / _MULTIPLE)
            group = min(self.group, width)
            widths.append(group * int(width / group + 0.5))
        return widths


_WIDTHS = {
    "400MF": Widths(depth=22, first=24, slope=24.48, factor=2.54, group=16),
    "32GF": Widths(depth=23, first=320, slope=69.86, factor=2.0, group=168),
}


class Block(nn.Module):
    """1x1, grouped 3x3, 1x1 convolutions around a shortcut: [N, C, H, W] -> [N, W, H/s, W/s]."""

    def __init__(self, channels: int, width: int, group: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        groups = width // min(group, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        y = self.act(self.bn2(self.conv2(y)))
        return self.act(self.bn3(self.conv3(y)) + self.shortcut(x))


class RegNet(nn.Module):
    """A stem, a stage for each width, a linear head: [N, 3, H, W] -> [N, classes]."""

    def __init__(self, widths: list[int], group: int, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, _STEM, 3, 2, padding=1, bias=False),
            nn.BatchNorm2d(_STEM),
            nn.ReLU(inplace=True),
        )
        channels = _STEM
        self.stages = nn.Sequential()
        for width, blocks in groupby(widths):
            stage = nn.Sequential()
            for position, _ in enumerate(blocks):
                stage.append(Block(channels, width, group, 2 if position == 0 else 1))
                channels = width
            self.stages.append(stage)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        initialise_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.average(self.stages(self.stem(images))).flatten(1))


def regnet(batch: int, size: ImageSize, *, flops: str) -> Example:
    """Return a RegNetX with images of `size` pixels; cross-entropy outside the model.

    `flops`: its name, "400MF" or "32GF".
    """
    widths = _WIDTHS[flops]
    model = RegNet(widths.of_blocks(), widths.group)
    return classification(model, batch, height_and_width(size))
