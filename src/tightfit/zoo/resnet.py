"""ResNet-50 (He et al., 2016), stride in the 3x3 convolution, as in torchvision."""

from __future__ import annotations

from torch import Tensor, nn

from tightfit.zoo.example import (
    Example,
    ImageSize,
    classification,
    height_and_width,
    initialise_convolutions,
)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut: [N, C, H, W] -> [N, 4 width, H/s, W/s]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.act = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False),
                nn.BatchNorm2d(4 * width),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        y = self.act(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.act(y + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four layers of bottlenecks, a linear head: [N, 3, H, W] -> [N, classes]."""

    def __init__(self, blocks: tuple[int, int, int, int], classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        channels = 64
        for number, count in enumerate(blocks):
            width = 64 << number
            layer = nn.Sequential()
            for position in range(count):
                stride = 2 if number > 0 and position == 0 else 1
                layer.append(Bottleneck(channels, width, stride))
                channels = 4 * width
            self.add_module(f"layer{number + 1}", layer)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        initialise_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.act(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.average(x).flatten(1))


def resnet50(batch: int, size: ImageSize) -> Example:
    """Return ResNet-50 with images of `size` pixels; cross-entropy outside the model."""
    return classification(ResNet((3, 4, 6, 3)), batch, height_and_width(size))
