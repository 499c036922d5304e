"""MLP-Mixer B/16 (Tolstikhin et al., 2021): linear layers over patches, then over channels."""

from __future__ import annotations

from torch import Tensor, nn

from tightfit.zoo.attention import FeedForward
from tightfit.zoo.example import Example, ImageSize, classification, height_and_width

_PATCH = 16


class Block(nn.Module):
    """Mixes patches, then channels, each after a LayerNorm and around a shortcut: [N, T, D]."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width, eps=1e-6)
        self.over_patches = FeedForward(patches, width // 2)
        self.ln2 = nn.LayerNorm(width, eps=1e-6)
        self.over_channels = FeedForward(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.ln1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.ln2(x))


class Mixer(nn.Module):
    """A mixer of patches: [N, 3, H, W] -> [N, classes]."""

    def __init__(
        self, sides: tuple[int, int], *, layers: int = 12, width: int = 768, classes: int = 1000
    ) -> None:
        super().__init__()
        patches = (sides[0] // _PATCH) * (sides[1] // _PATCH)
        self.patches = nn.Conv2d(3, width, _PATCH, _PATCH)
        self.blocks = nn.Sequential(*(Block(patches, width) for _ in range(layers)))
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, read from the mean patch."""
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        return self.head(self.ln(x).mean(1))


def mlp_mixer(batch: int, size: ImageSize) -> Example:
    """Return MLP-Mixer B/16 with images of `size` pixels; cross-entropy outside the model."""
    sides = height_and_width(size, multiple=_PATCH)
    return classification(Mixer(sides), batch, sides)
