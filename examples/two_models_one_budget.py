"""Train two models that take turns, the generator and the discriminator of a GAN, in one budget.

Run with ``python examples/two_models_one_budget.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit

NOISE, WIDTH = 64, 32


def generator() -> nn.Module:
    """Return a network from noise [N, 64, 1, 1] to images [N, 3, 64, 64]."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(NOISE, 8 * WIDTH, 4, bias=False), nn.ReLU()]
    for width in (8 * WIDTH, 4 * WIDTH, 2 * WIDTH):
        layers += [nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(width // 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1), nn.Tanh())


def discriminator() -> nn.Module:
    """Return a network from images [N, 3, 64, 64] to one score each [N]."""
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2)]
    for width in (WIDTH, 2 * WIDTH, 4 * WIDTH):
        layers += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(8 * WIDTH, 1, 4), nn.Flatten(0))


def loss_of(scores: Tensor, *, real: bool) -> Tensor:
    """Return how far scores are from calling their images real, or made."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def main() -> None:
    """Train four rounds inside 60 MiB; plain PyTorch needs 83 MiB."""
    torch.manual_seed(0)
    makes, judges = generator(), discriminator()
    of_makes = torch.optim.Adam(makes.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_judges = torch.optim.Adam(judges.parameters(), lr=2e-4, betas=(0.5, 0.999))
    budget = tightfit.Budget("60MiB")
    tightfit.fit(makes, budget, optimizer=of_makes)
    tightfit.fit(judges, budget, optimizer=of_judges)
    for number in range(1, 5):
        images = torch.rand(32, 3, 64, 64) * 2 - 1
        made = makes(torch.randn(32, NOISE, 1, 1))

        of_judges.zero_grad()
        judged = loss_of(judges(images), real=True) + loss_of(judges(made.detach()), real=False)
        judged.backward()
        of_judges.step()

        of_makes.zero_grad()
        fooled = loss_of(judges(made), real=True)
        fooled.backward()
        of_makes.step()
        print(f"round {number}: discriminator {judged.item():.4f}, generator {fooled.item():.4f}")
    print(tightfit.report(makes))
    print(tightfit.report(judges))


if __name__ == "__main__":
    main()
