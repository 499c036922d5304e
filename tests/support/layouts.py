"""Models in which kernels lay out their results otherwise than their fake kernels say."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class TransposedNorm(nn.Module):
    """BatchNorm over features that lie last; the storage of its loss is that of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(16, 16)

    def forward(self, x):
        y = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return F.mse_loss(self.second(self.dropout(F.gelu(y))), x)


class OnePixel(nn.Module):
    """Pools to images of one pixel, whose memory format is anybody's guess, and scales them up."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.pooled = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.joined = nn.Sequential(
            nn.Conv2d(24, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        y = self.norm(self.body(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        small = self.pooled(F.adaptive_avg_pool2d(y, 1))
        wide = F.interpolate(small, size=y.shape[2:], mode="bilinear")
        z = self.joined(torch.cat([y, wide], 1))
        return self.head(F.interpolate(z, scale_factor=2, mode="bilinear")).square().mean()
