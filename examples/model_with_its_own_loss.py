"""Train a language model that returns its own loss, as Hugging Face models do.

Given ``labels`` the model returns an object with ``loss`` and ``logits``; the loss is then planned
together with the model. Run with ``python examples/model_with_its_own_loss.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit


class Output(NamedTuple):
    """What the model returns: a scalar loss (None without labels) and logits [N, T, V]."""

    loss: Tensor | None
    logits: Tensor


class LanguageModel(nn.Module):
    """A small causal transformer over tokens [N, T]."""

    def __init__(self, vocabulary: int = 8000, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Return logits of the next token, with their loss if labels are given."""
        x = self.embedding(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.head(x)
        if labels is None:
            return Output(None, logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


def main() -> None:
    """Train three steps inside 160 MiB; plain PyTorch needs 200 MiB."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    tightfit.fit(model, budget="160MiB", optimizer=optimizer)
    tokens = torch.randint(0, 8000, (8, 128))
    for number in range(1, 4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number}: loss {loss.item():.4f}")
    print(tightfit.report(model))


if __name__ == "__main__":
    main()
