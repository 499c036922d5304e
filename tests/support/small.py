"""Small models for commands that are given a file and a name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tightfit.zoo import Example


class Tokens(nn.Module):
    """Attention, a norm, and a loss over a few hundred words."""

    def __init__(self, attentions: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.attentions, self.dropout = attentions, dropout
        self.words, self.norm = nn.Embedding(300, 16), nn.LayerNorm(16)
        self.three, self.head = nn.Linear(16, 48), nn.Linear(16, 300, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of [N, tokens] words, each predicted from those up to it."""
        x = self.norm(self.words(words))
        for _ in range(self.attentions):
            heads = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.three(x).chunk(3, -1))
            x = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout, is_causal=True)
            x = x.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


class Pooled(nn.Module):
    """Convolutions of images [N, 1, 16, 16], each with a maximum of four."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.pool(self.first(x).relu())
        return self.pool(self.second(x).relu()).square().mean()


def pooled() -> Example:
    """Two images."""
    return Example(Pooled().train(), None, (torch.randn(2, 1, 16, 16),), None)


def tokens() -> Example:
    """Four rows of 24 words."""
    return _example(Tokens())


def two_attentions() -> Example:
    """The same for a model that attends twice."""
    return _example(Tokens(attentions=2))


def two_with_dropout() -> Example:
    """The same, with dropout in both attentions."""
    return _example(Tokens(attentions=2, dropout=0.1))


def _example(model: Tokens) -> Example:
    return Example(model.train(), None, (torch.randint(0, 300, (4, 24)),), None)
