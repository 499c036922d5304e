"""ViT-B/16 (Dosovitskiy et al., 2021): patches, a class token, a pre-norm encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tightfit.zoo.attention import FeedForward, SelfAttention, initialise_transformer
from tightfit.zoo.example import Example, ImageSize, classification, height_and_width

_PATCH = 16


class Block(nn.Module):
    """Attention and feed-forward, each after a LayerNorm and around a shortcut: [N, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = SelfAttention(width, heads, 0.0)
        self.ln2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = FeedForward(width, 4 * width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.ln1(x)))
        return x + self.dropout(self.mlp(self.ln2(x)))


class ViT(nn.Module):
    """A vision transformer: [N, 3, H, W] -> [N, classes]."""

    def __init__(
        self,
        sides: tuple[int, int],
        *,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.0,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        patches = (sides[0] // _PATCH) * (sides[1] // _PATCH)
        self.patches = nn.Conv2d(3, width, _PATCH, _PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        initialise_transformer(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, read from the class token."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)
        x = self.blocks(self.dropout(x + self.positions))
        return self.head(self.ln(x)[:, 0])


def vit(batch: int, size: ImageSize, dropout: float) -> Example:
    """Return ViT-B/16 with images of `size` pixels; cross-entropy outside the model."""
    sides = height_and_width(size, multiple=_PATCH)
    return classification(ViT(sides, dropout=dropout), batch, sides)
