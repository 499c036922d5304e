"""BERT base (Devlin et al., 2019): post-norm encoder with its masked-word head, loss inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.zoo.attention import FeedForward, SelfAttention, initialise_transformer
from tightfit.zoo.example import Example

_IGNORED = -100
_MASKED_SHARE = 0.15


class Layer(nn.Module):
    """Attention and feed-forward, each followed by a LayerNorm of the sum: [N, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout)
        self.ln1 = nn.LayerNorm(width, eps=1e-12)
        self.mlp = FeedForward(width, 4 * width)
        self.ln2 = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(x + self.dropout(self.attention(x)))
        return self.ln2(x + self.dropout(self.mlp(x)))


class BERT(nn.Module):
    """A masked language model that returns its loss: words, types, targets [N, T] -> scalar."""

    def __init__(
        self,
        *,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 30522,
        context: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.types = nn.Embedding(2, width)
        self.ln = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.transform = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12)
        )
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.words.weight
        initialise_transformer(self)

    def forward(self, words: Tensor, types: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the masked words (targets other than -100)."""
        places = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.types(types) + self.positions(places)
        x = self.dropout(self.ln(x))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.transform(x))
        return F.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=_IGNORED
        )


def bert(batch: int, sequence: int, dropout: float) -> Example:
    """Return BERT base on `batch` texts of `sequence` words; its output is the loss."""
    model = BERT(dropout=dropout, context=max(512, sequence))
    words = torch.randint(0, 30522, (batch, sequence))
    types = torch.zeros_like(words)
    masked = torch.rand(batch, sequence) < _MASKED_SHARE
    targets = torch.where(masked, torch.randint(0, 30522, (batch, sequence)), _IGNORED)
    targets[:, 0] = words[:, 0]
    return Example(model.train(), None, (words, types, targets), None)
