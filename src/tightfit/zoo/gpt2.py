"""GPT-2 small (Radford et al., 2019): pre-norm decoder, tied embeddings, the loss inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.zoo.attention import FeedForward, SelfAttention, initialise_transformer
from tightfit.zoo.example import Example


class Block(nn.Module):
    """Attention and feed-forward, each after a LayerNorm and around a shortcut: [N, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout, causal=True)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, 4 * width, approximate="tanh")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.ln1(x)))
        return x + self.dropout(self.mlp(self.ln2(x)))


class GPT2(nn.Module):
    """A language model that returns its loss: tokens [N, T], targets [N, T] -> scalar."""

    def __init__(
        self,
        *,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 50257,
        context: int = 1024,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        initialise_transformer(self)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next tokens."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def gpt2(batch: int, sequence: int, dropout: float) -> Example:
    """Return GPT-2 small on `batch` texts of `sequence` tokens; its output is the loss."""
    model = GPT2(dropout=dropout, context=max(1024, sequence))
    tokens = torch.randint(0, 50257, (batch, sequence))
    targets = torch.randint(0, 50257, (batch, sequence))
    return Example(model.train(), None, (tokens, targets), None)
