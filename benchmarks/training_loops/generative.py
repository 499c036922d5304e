"""Diffusion with accumulation and averaging; an autoencoder with a codebook."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.training_loops.run import Run

__all__ = ["diffusion", "vector_quantised"]


class Block(nn.Module):
    """A residual block that takes the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(width, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(time)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class Denoiser(nn.Module):
    """Predicts the noise in an image."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.inwards = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Block(width) for _ in range(depth))
        self.up = nn.ModuleList(Block(width) for _ in range(depth))
        self.join = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in range(depth))
        self.outwards = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        steps = torch.arange(self.width // 2, device=x.device)
        angles = t[:, None] * torch.exp(-math.log(10000.0) * steps / (self.width // 2))
        time = torch.cat([angles.sin(), angles.cos()], 1)
        h, kept = self.inwards(x), []
        for block in self.down:
            h = block(h, time)
            kept.append(h)
        for block, join in zip(self.up, self.join, strict=True):
            h = block(join(torch.cat([h, kept.pop()], 1)), time)
        return self.outwards(h)


def diffusion(run: Run) -> None:
    """A diffusion model: Adam, two micro-batches a step, averaged weights; no optimizer given."""
    model = Denoiser(run.size(16, 64), run.size(2, 3))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    noise_left = torch.linspace(0.999, 0.01, 1000)
    batch, side = run.size(4, 8), run.size(8, 32)

    run.fit(model)

    for _ in range(run.steps):
        losses = []
        for _micro in range(2):
            x, noise = torch.rand(batch, 3, side, side) * 2 - 1, torch.randn(batch, 3, side, side)
            t = torch.randint(0, 1000, (batch,))
            share = noise_left[t][:, None, None, None]
            noisy = share.sqrt() * x + (1 - share).sqrt() * noise
            loss = F.mse_loss(model(noisy, t), noise) / 2
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for averaged, trained in zip(average.parameters(), model.parameters(), strict=True):
                averaged.lerp_(trained, 0.001)
        run.note(*losses)
    run.trained(model, average)


class Codebook(nn.Module):
    """Replaces vectors by the nearest of a table, straight through for gradients."""

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(codes, width)
        nn.init.uniform_(self.table.weight, -1 / codes, 1 / codes)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.permute(0, 2, 3, 1)
        distance = (
            flat.square().sum(-1, keepdim=True)
            - 2 * flat @ self.table.weight.t()
            + self.table.weight.square().sum(1)
        )
        nearest = self.table(distance.argmin(-1)).permute(0, 3, 1, 2)
        loss = F.mse_loss(nearest, z.detach()) + 0.25 * F.mse_loss(z, nearest.detach())
        return z + (nearest - z).detach(), loss


class Autoencoder(nn.Module):
    """Encodes images into a grid of codes and back."""

    def __init__(self, width: int, codes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1),
        )
        self.codebook = Codebook(codes, width)
        self.decoder = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, loss = self.codebook(self.encoder(x))
        return self.decoder(codes), loss


def vector_quantised(run: Run) -> None:
    """A vector-quantised autoencoder over a data set whose last batch is smaller."""
    batch, side = run.size(6, 16), run.size(16, 64)
    data = TensorDataset(torch.rand(2 * batch + batch // 2, 3, side, side))
    model = Autoencoder(run.size(16, 64), run.size(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    run.fit(model, optimizer=optimizer)

    step = 0
    while step < run.steps:
        for (x,) in DataLoader(data, batch_size=batch, shuffle=True):
            output, loss_codes = model(x)
            loss = F.mse_loss(output, x) + loss_codes
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.note(loss)
            step += 1
    run.trained(model)
