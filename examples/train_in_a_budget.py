"""Train a small convolutional network with the memory of its activations cut to half.

Run with ``python examples/train_in_a_budget.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import tightfit


def network() -> nn.Module:
    """Return a network for images [N, 3, 64, 64] and ten classes."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 32, 64, 64, 128, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(), nn.Dropout2d(0.1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def main() -> None:
    """Train three steps inside 200 MiB; plain PyTorch needs 372 MiB."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    tightfit.fit(model, budget="200MiB", optimizer=optimizer)
    images, classes = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
    for number in range(1, 4):
        loss = F.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {number}: loss {loss.item():.4f}")
    print(tightfit.report(model))


if __name__ == "__main__":
    main()
