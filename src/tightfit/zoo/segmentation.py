"""FCN-8s (Long et al., 2015) and SegNet (Badrinarayanan et al., 2017), both on VGG-16.

FCN-8s pads its convolutions instead of padding the image by 100 pixels and cropping.
"""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.zoo.example import (
    Example,
    ImageSize,
    height_and_width,
    initialise_convolutions,
    segmentation,
)
from tightfit.zoo.vgg import VGG16_STAGES

_CLASSES = 21


class FCN8(nn.Module):
    """VGG-16 made convolutional, three scores fused: [N, 3, H, W] -> [N, classes, H, W]."""

    def __init__(self, dropout: float = 0.5, classes: int = _CLASSES) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        channels = 3
        for width, count in VGG16_STAGES:
            stage = nn.Sequential()
            for _ in range(count):
                stage.append(nn.Conv2d(channels, width, 3, padding=1))
                stage.append(nn.ReLU(inplace=True))
                channels = width
            stage.append(nn.MaxPool2d(2))
            self.stages.append(stage)
        self.classifier = nn.Sequential(
            nn.Conv2d(512, 4096, 7, padding=3),
            nn.ReLU(inplace=True),
            nn.Dropout2d(dropout),
            nn.Conv2d(4096, 4096, 1),
            nn.ReLU(inplace=True),
            nn.Dropout2d(dropout),
            nn.Conv2d(4096, classes, 1),
        )
        self.score4 = nn.Conv2d(512, classes, 1)
        self.score3 = nn.Conv2d(256, classes, 1)
        self.double5 = nn.ConvTranspose2d(classes, classes, 4, 2, padding=1, bias=False)
        self.double4 = nn.ConvTranspose2d(classes, classes, 4, 2, padding=1, bias=False)
        self.enlarge = nn.ConvTranspose2d(classes, classes, 16, 8, padding=4, bias=False)
        initialise_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        third = self.stages[2](self.stages[1](self.stages[0](images)))
        fourth = self.stages[3](third)
        score = self.classifier(self.stages[4](fourth))
        score = self.double5(score) + self.score4(fourth)
        score = self.double4(score) + self.score3(third)
        return self.enlarge(score)


class SegNet(nn.Module):
    """VGG-16 mirrored, unpooled by max positions: [N, 3, H, W] -> [N, classes, H, W]."""

    def __init__(self, classes: int = _CLASSES) -> None:
        super().__init__()
        self.encoder = nn.ModuleList()
        self.decoder = nn.ModuleList()
        channels = 3
        for width, count in VGG16_STAGES:
            self.encoder.append(self._stage([channels, *[width] * count]))
            mirrored = self._stage([*[width] * count, max(channels, 64)])
            self.decoder.insert(0, mirrored)
            channels = width
        # the last convolution of the decoder gives the logits: no BatchNorm, no activation
        self.decoder[-1] = self.decoder[-1][:-3]
        self.decoder[-1].append(nn.Conv2d(64, classes, 3, padding=1))
        initialise_convolutions(self)

    @staticmethod
    def _stage(widths: list[int]) -> nn.Sequential:
        stage = nn.Sequential()
        for channels, width in itertools.pairwise(widths):
            stage.append(nn.Conv2d(channels, width, 3, padding=1))
            stage.append(nn.BatchNorm2d(width))
            stage.append(nn.ReLU(inplace=True))
        return stage

    def forward(self, images: Tensor) -> Tensor:
        x, positions = images, []
        for stage in self.encoder:
            x, position = F.max_pool2d(stage(x), 2, return_indices=True)
            positions.append(position)
        for stage in self.decoder:
            x = stage(F.max_unpool2d(x, positions.pop(), 2))
        return x


def fcn8(batch: int, size: ImageSize, dropout: float) -> Example:
    """Return FCN-8s with images of `size` pixels; cross-entropy per pixel outside the model."""
    sides = height_and_width(size, multiple=32)
    return segmentation(FCN8(dropout), batch, 3, sides, classes=_CLASSES)


def segnet(batch: int, size: ImageSize) -> Example:
    """Return SegNet with images of `size` pixels; cross-entropy per pixel outside the model."""
    sides = height_and_width(size, multiple=32)
    return segmentation(SegNet(), batch, 3, sides, classes=_CLASSES)
