"""The result of a model factory, and the inputs that several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.errors import BadInput

ImageSize: TypeAlias = int | tuple[int, int]


class Example(NamedTuple):
    """A model with one batch to train on."""

    model: nn.Module  # in training mode
    # ``loss(output, target)``; None if the model's output is the loss
    loss: Callable[[Any, Any], Tensor] | None
    args: tuple[Any, ...] | dict[str, Any]  # the model's positional or keyword inputs
    target: Tensor | None  # of the loss

    def to(self, device: torch.device | str) -> Example:
        """Return the example on a device; the model moves in place."""

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        args: Any
        if isinstance(self.args, dict):
            args = {key: moved(value) for key, value in self.args.items()}
        else:
            args = tuple(map(moved, self.args))
        return Example(self.model.to(device), self.loss, args, moved(self.target))


def height_and_width(size: ImageSize, *, multiple: int = 1) -> tuple[int, int]:
    """Return (height, width) of a square or rectangular image size.

    Raises `BadInput` if a side is not a positive multiple of the model's total stride.
    """
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or any(side < 1 or side % multiple for side in sides):
        raise BadInput(
            f"the image size {size} does not fit: this model needs positive multiples of {multiple}"
        )
    return sides


def classification(model: nn.Module, batch: int, sides: tuple[int, int]) -> Example:
    """Return an example with images [batch, 3, height, width], each of one of 1000 classes."""
    images = torch.randn(batch, 3, *sides)
    target = torch.randint(0, 1000, (batch,))
    return Example(model.train(), F.cross_entropy, (images,), target)


def segmentation(
    model: nn.Module, batch: int, channels: int, sides: tuple[int, ...], *, classes: int
) -> Example:
    """Return an example with images [batch, channels, *sides] and one class per pixel."""
    images = torch.randn(batch, channels, *sides)
    target = torch.randint(0, classes, (batch, *sides))
    return Example(model.train(), F.cross_entropy, (images,), target)


def initialise_convolutions(model: nn.Module) -> None:
    """Draw every convolution's weight so that ReLU networks keep their variance (He 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
