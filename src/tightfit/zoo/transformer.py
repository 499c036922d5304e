"""The transformer (Vaswani et al., 2017): encoder and decoder, tied embeddings, loss inside."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.zoo.attention import FeedForward, SelfAttention, initialise_transformer
from tightfit.zoo.example import Example

_VOCABULARY = 37000
_CONTEXT = 1024


class CrossAttention(nn.Module):
    """Multi-head attention of a text to the encoding of another: [N, T, D], [N, S, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.keys_values = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        keys, values = self.keys_values(encoded).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(*map(self._by_head, (self.query(x), keys, values)))
        return self.out(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each followed by a LayerNorm of the sum: [N, S, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, 0.0)
        self.ln1 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, 4 * width)
        self.ln2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(x + self.dropout(self.attention(x)))
        return self.ln2(x + self.dropout(self.mlp(x)))


class DecoderLayer(nn.Module):
    """Causal attention, attention to the encoded text, feed-forward: [N, T, D], [N, S, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, 0.0, causal=True)
        self.ln1 = nn.LayerNorm(width)
        self.cross = CrossAttention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, 4 * width)
        self.ln3 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        x = self.ln1(x + self.dropout(self.attention(x)))
        x = self.ln2(x + self.dropout(self.cross(x, encoded)))
        return self.ln3(x + self.dropout(self.mlp(x)))


class Transformer(nn.Module):
    """An encoder and decoder that return the loss: [N, S], [N, T], targets [N, T] -> scalar."""

    positions: Tensor

    def __init__(
        self, *, layers: int, width: int, heads: int, dropout: float, context: int
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, width)
        self.register_buffer("positions", _sinusoids(context, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, dropout) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        initialise_transformer(self)

    def _embedded(self, words: Tensor) -> Tensor:
        return self.dropout(self.words(words) + self.positions[: words.shape[1]])

    def forward(self, source: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next words."""
        encoded = self._embedded(source)
        for layer in self.encoder:
            encoded = layer(encoded)
        x = self._embedded(words)
        for layer in self.decoder:
            x = layer(x, encoded)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _sinusoids(context: int, width: int) -> Tensor:
    """Return the position of each word as sines and cosines of falling frequencies: [T, D]."""
    places = torch.arange(context)[:, None]
    frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    return torch.stack(
        [torch.sin(places * frequencies), torch.cos(places * frequencies)], -1
    ).flatten(1)


def transformer(
    batch: int, sequence: int, dropout: float, *, layers: int, width: int, heads: int
) -> Example:
    """Return a transformer on pairs of texts of `sequence` words; its output is the loss."""
    model = Transformer(
        layers=layers,
        width=width,
        heads=heads,
        dropout=dropout,
        context=max(_CONTEXT, sequence),
    )
    source, words, targets = (torch.randint(0, _VOCABULARY, (batch, sequence)) for _ in range(3))
    return Example(model.train(), None, (source, words, targets), None)
