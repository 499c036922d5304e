"""A word-level language model of stacked LSTM cells (Hochreiter and Schmidhuber, 1997).

The time loop is unrolled in Python, in plain operators: long chains of small repeated blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.zoo.example import Example

_VOCABULARY = 10000


class Cell(nn.Module):
    """One step of an LSTM: x [N, I], hidden and cell state [N, H] -> new hidden, cell state."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.of_input = nn.Linear(inputs, 4 * hidden)
        self.of_hidden = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states after this step."""
        gates = self.of_input(x) + self.of_hidden(hidden)
        enter, forget, content, leave = gates.chunk(4, 1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(content)
        return torch.sigmoid(leave) * torch.tanh(cell), cell


class WordModel(nn.Module):
    """Embedding, `layers` unrolled LSTM layers, linear head: [N, T] -> [N, T, vocabulary]."""

    def __init__(self, *, vocabulary: int = _VOCABULARY, width: int = 512, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(Cell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of the next word after every word."""
        embedded = self.words(words)
        zero = embedded.new_zeros(words.shape[0], embedded.shape[2])
        states = [(zero, zero)] * len(self.cells)
        outputs = []
        for time in range(words.shape[1]):
            x = embedded[:, time]
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            outputs.append(x)
        return self.head(torch.stack(outputs, 1))


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def lstm(batch: int, sequence: int) -> Example:
    """Return the word model on `batch` texts of `sequence` words; loss outside the model."""
    words = torch.randint(0, _VOCABULARY, (batch, sequence))
    target = torch.randint(0, _VOCABULARY, (batch, sequence))
    return Example(WordModel().train(), _loss, (words,), target)
