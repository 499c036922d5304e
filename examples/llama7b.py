"""A Llama-shaped transformer of 7 billion parameters, in plain torch.

Ask what it needs without ever allocating it::

    tightfit check examples/llama7b.py:llama7b --costs a100 --optimizer adamw --budget 80GiB
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, HIDDEN, HEADS, INNER, WORDS, TOKENS = 32, 4096, 32, 11008, 32000, 2048


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of features by angles that grow with the position (RoPE)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * angles.cos() + turned * angles.sin()


class Attention(nn.Module):
    """Causal self-attention of [batch, tokens, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.value = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            project(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(query, angles), rotated(key, angles), value, is_causal=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, HIDDEN))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.feed_forward_norm = nn.RMSNorm(HIDDEN)
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Returns the loss of predicting each next token of [batch, tokens]."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        half = torch.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS)
        angles = torch.outer(torch.arange(TOKENS), 10000.0**-half)
        self.register_buffer("angles", torch.cat((angles, angles), dim=-1), persistent=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.angles[: tokens.shape[1]])
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def llama7b(batch: int | None = None):
    """Return the model in bfloat16 with its tokens; the output is the loss."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Llama().train()
    finally:
        torch.set_default_dtype(before)
    tokens = torch.randint(0, WORDS, (batch or 1, TOKENS + 1))
    return model, None, (tokens[:, :-1], tokens[:, 1:]), None
