"""U-Net (Ronneberger et al., 2015) and 3D U-Net (Cicek et al., 2016), with BatchNorm.

Padded convolutions, so that the output has the size of the input; transposed convolutions on
the way up. The 3D one doubles its channels before a pooling, as its paper does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tightfit.zoo.example import (
    Example,
    ImageSize,
    height_and_width,
    initialise_convolutions,
    segmentation,
)


def _double_convolution(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    )


class _Skipping(nn.Module):
    """Halves and doubles its input, with a skip around each halving."""

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for down in self.down:
            skips.append(down(x))
            x = self.pool(skips[-1])
        x = self.bottom(x)
        for transposed, up in zip(self.transposed, self.up, strict=True):
            x = up(torch.cat([skips.pop(), transposed(x)], 1))
        return self.head(x)


class UNet(_Skipping):
    """`depth` halvings and doublings with skips: [N, C, H, W] -> [N, classes, H, W]."""

    def __init__(
        self, channels: int = 1, classes: int = 2, width: int = 32, depth: int = 4
    ) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        for level in range(depth):
            self.down.append(_double_convolution(channels, width << level))
            channels = width << level
        self.pool = nn.MaxPool2d(2)
        self.bottom = _double_convolution(channels, 2 * channels)
        self.transposed = nn.ModuleList()
        self.up = nn.ModuleList()
        for level in reversed(range(depth)):
            wide = width << level
            self.transposed.append(nn.ConvTranspose2d(2 * wide, wide, 2, stride=2))
            self.up.append(_double_convolution(2 * wide, wide))
        self.head = nn.Conv2d(width, classes, 1)
        initialise_convolutions(self)


def _double_convolution3d(channels: int, width: int, wide: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels, width, 3, padding=1),
        nn.BatchNorm3d(width),
        nn.ReLU(inplace=True),
        nn.Conv3d(width, wide, 3, padding=1),
        nn.BatchNorm3d(wide),
        nn.ReLU(inplace=True),
    )


class UNet3d(_Skipping):
    """Three halvings and doublings with skips: [N, C, D, H, W] -> [N, classes, D, H, W]."""

    def __init__(self, channels: int = 3, classes: int = 3, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        for level in range(3):
            self.down.append(_double_convolution3d(channels, width << level, 2 * width << level))
            channels = 2 * width << level
        self.pool = nn.MaxPool3d(2)
        self.bottom = _double_convolution3d(channels, channels, 2 * channels)
        self.transposed = nn.ModuleList()
        self.up = nn.ModuleList()
        for level in reversed(range(3)):
            wide = 2 * width << level
            self.transposed.append(nn.ConvTranspose3d(2 * wide, 2 * wide, 2, 2, bias=False))
            self.up.append(_double_convolution3d(3 * wide, wide, wide))
        self.head = nn.Conv3d(2 * width, classes, 1)
        initialise_convolutions(self)


def unet(
    batch: int, size: ImageSize, *, channels: int, classes: int, width: int, depth: int
) -> Example:
    """Return a U-Net with images of `size` pixels; cross-entropy per pixel outside the model."""
    sides = height_and_width(size, multiple=1 << depth)
    model = UNet(channels, classes, width, depth)
    return segmentation(model, batch, channels, sides, classes=classes)


def unet3d(batch: int, size: ImageSize) -> Example:
    """Return a 3D U-Net with cubes of `size` voxels; cross-entropy per voxel outside the model."""
    height, width = height_and_width(size, multiple=8)
    return segmentation(UNet3d(), batch, 3, (height, height, width), classes=3)
