"""Small models for commands that are given a file and a name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tightfit.zoo import Example


class Tokens(nn.Module):
    """Attention, a norm, and a loss over a few hundred words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(300, 16), nn.LayerNorm(16)
        self.three, self.head = nn.Linear(16, 48), nn.Linear(16, 300, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of [N, tokens] words, each predicted from those up to it."""
        x = self.norm(self.words(words))
        heads = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.three(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def tokens() -> Example:
    """Four rows of 24 words."""
    return Example(Tokens().train(), None, (torch.randint(0, 300, (4, 24)),), None)
