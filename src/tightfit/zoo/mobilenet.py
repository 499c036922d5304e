"""MobileNet v1 (Howard et al., 2017) and v2 (Sandler et al., 2018), width 1.0."""

from __future__ import annotations

from torch import Tensor, nn

from tightfit.zoo.example import (
    Example,
    ImageSize,
    classification,
    height_and_width,
    initialise_convolutions,
)

# v1: (output channels, stride) of each depthwise separable convolution
_SEPARABLE = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)
# v2: (expansion, output channels, repetitions, stride of the first) of each stage
_INVERTED = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _convolution(
    channels: int,
    width: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] = nn.ReLU6,
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(width),
        activation(inplace=True),
    )


class MobileNetV1(nn.Module):
    """Thirteen depthwise separable convolutions: [N, 3, H, W] -> [N, classes]."""

    def __init__(self, dropout: float = 0.0, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(_convolution(3, 32, 3, 2, activation=nn.ReLU))
        channels = 32
        for width, stride in _SEPARABLE:
            depthwise = _convolution(
                channels, channels, 3, stride, groups=channels, activation=nn.ReLU
            )
            self.features.append(depthwise)
            self.features.append(_convolution(channels, width, 1, activation=nn.ReLU))
            channels = width
        self.average = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)
        initialise_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.dropout(self.average(self.features(images)).flatten(1)))


class InvertedResidual(nn.Module):
    """Expand, filter depthwise, project; with a shortcut where the shapes allow it."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        self.has_shortcut = stride == 1 and channels == width
        self.layers = nn.Sequential()
        if expansion != 1:
            self.layers.append(_convolution(channels, hidden, 1))
        self.layers.append(_convolution(hidden, hidden, 3, stride, groups=hidden))
        self.layers.append(nn.Conv2d(hidden, width, 1, bias=False))
        self.layers.append(nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.has_shortcut else self.layers(x)


class MobileNetV2(nn.Module):
    """Seventeen inverted residual blocks: [N, 3, H, W] -> [N, classes]."""

    def __init__(self, dropout: float = 0.2, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(_convolution(3, 32, 3, 2))
        channels = 32
        for expansion, width, count, first_stride in _INVERTED:
            for position in range(count):
                stride = first_stride if position == 0 else 1
                self.features.append(InvertedResidual(channels, width, stride, expansion))
                channels = width
        self.features.append(_convolution(channels, 1280, 1))
        self.average = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(1280, classes)
        initialise_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.dropout(self.average(self.features(images)).flatten(1)))


def mobilenet_v1(batch: int, size: ImageSize, dropout: float) -> Example:
    """Return MobileNet v1 with images of `size` pixels; cross-entropy outside the model."""
    return classification(MobileNetV1(dropout), batch, height_and_width(size))


def mobilenet_v2(batch: int, size: ImageSize, dropout: float) -> Example:
    """Return MobileNet v2 with images of `size` pixels; cross-entropy outside the model."""
    return classification(MobileNetV2(dropout), batch, height_and_width(size))
