"""VGG-16 and VGG-19 without BatchNorm (Simonyan and Zisserman, 2015), as in torchvision."""

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

VGG16_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
VGG19_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each ended by a pooling: [N, 3, H, W] -> [N, classes]."""

    def __init__(
        self, stages: tuple[tuple[int, int], ...], dropout: float = 0.5, classes: int = 1000
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        channels = 3
        for width, count in stages:
            for _ in range(count):
                self.features.append(nn.Conv2d(channels, width, 3, padding=1))
                self.features.append(nn.ReLU(inplace=True))
                channels = width
            self.features.append(nn.MaxPool2d(2))
        self.average = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )
        initialise_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.average(self.features(images)).flatten(1))


def vgg16(batch: int, size: ImageSize, dropout: float, *, channels_last: bool = False) -> Example:
    """Return VGG-16 with images of `size` pixels; cross-entropy outside the model.

    With `channels_last` the convolutions of a CPU need hardly any workspace.
    """
    sides = height_and_width(size, multiple=32)
    example = classification(VGG(VGG16_STAGES, dropout), batch, sides)
    if not channels_last:
        return example
    last = torch.channels_last
    images = tuple(image.contiguous(memory_format=last) for image in example.args)
    return example._replace(model=example.model.to(memory_format=last), args=images)


def vgg19(batch: int, size: ImageSize, dropout: float) -> Example:
    """Return VGG-19 with images of `size` pixels; cross-entropy outside the model."""
    sides = height_and_width(size, multiple=32)
    return classification(VGG(VGG19_STAGES, dropout), batch, sides)
