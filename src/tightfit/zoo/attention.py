"""The two halves of a transformer layer, shared by GPT-2, BERT and ViT."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Multi-head self-attention with one projection to queries, keys, values: [N, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class FeedForward(nn.Module):
    """Linear, GELU, linear: [N, T, D]; `approximate` is GELU's."""

    def __init__(self, width: int, hidden: int, *, approximate: str = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU(approximate)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def initialise_transformer(model: nn.Module) -> None:
    """Draw every weight matrix from a normal distribution of deviation 0.02, biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
