"""Generative adversarial networks: two models, two optimizers, each sees the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_loops.run import Run

__all__ = ["gan", "gan_one_budget"]

LATENT = 32


def generator(width: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 4 * width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
        nn.Tanh(),
    )


def critic(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4 * width, 1, 4, 1, 0),
        nn.Flatten(0),
    )


def gan(run: Run) -> None:
    """A GAN on images of 32 x 32; each model is fitted by itself, within half of the budget."""
    make, judge = generator(run.size(8, 32)), critic(run.size(8, 32))
    makes = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judges = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))

    run.fit(make, optimizer=makes, share=0.5)
    run.fit(judge, optimizer=judges, share=0.5)

    train(run, make, judge, makes, judges)


def gan_one_budget(run: Run) -> None:
    """The same with one budget that both models share."""
    make, judge = generator(run.size(8, 32)), critic(run.size(8, 32))
    makes = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judges = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))

    budget = run.budget()
    run.fit(make, budget, optimizer=makes)
    run.fit(judge, budget, optimizer=judges)

    train(run, make, judge, makes, judges)


def train(
    run: Run,
    make: nn.Module,
    judge: nn.Module,
    makes: torch.optim.Optimizer,
    judges: torch.optim.Optimizer,
) -> None:
    """Train the critic on real and on made images, then the generator through the critic."""
    batch = run.size(8, 64)
    for _ in range(run.steps):
        real = torch.rand(batch, 3, 32, 32) * 2 - 1
        noise = torch.randn(batch, LATENT, 1, 1)

        judge.zero_grad()
        loss_real = against(judge(real), 1.0)
        loss_real.backward()
        made = make(noise)
        loss_made = against(judge(made.detach()), 0.0)
        loss_made.backward()
        judges.step()

        make.zero_grad()
        loss_make = against(judge(made), 1.0)
        loss_make.backward()
        makes.step()

        run.note(loss_real, loss_made, loss_make)
    run.trained(make, judge)


def against(scores: Tensor, wanted: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))
