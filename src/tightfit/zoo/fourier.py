"""Fourier neural operator (Li et al., 2021) and U-FNO (Wen et al., 2022), in two dimensions.

Inputs are the values of a field and their coordinates, outputs those of another field.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.errors import BadInput
from tightfit.zoo.example import Example, ImageSize, height_and_width

_PROJECTED = 128


class SpectralConvolution(nn.Module):
    """Mixes channels at each of the lowest frequencies, drops all others: [N, C, H, W]."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        drawn = torch.rand(width, width, 2 * modes, modes, dtype=torch.cfloat)
        self.weight = nn.Parameter(drawn / width**2)

    def forward(self, x: Tensor) -> Tensor:
        modes, (height, width) = self.modes, x.shape[-2:]
        spectrum = torch.fft.rfft2(x)
        lowest = torch.cat([spectrum[..., :modes, :modes], spectrum[..., -modes:, :modes]], -2)
        mixed = torch.einsum("nihw,iohw->nohw", lowest, self.weight)
        positive, negative = mixed.split(modes, -2)
        between = mixed.new_zeros(*mixed.shape[:2], height - 2 * modes, modes)
        columns = torch.cat([positive, between, negative], -2)
        whole = F.pad(columns, (0, spectrum.shape[-1] - modes))
        return torch.fft.irfft2(whole, s=(height, width))


class SmallUNet(nn.Module):
    """Two halvings and doublings with skips, next to a spectral convolution: [N, C, H, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(self._halving(width) for _ in range(2))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(channels, width, 4, 2, padding=1) for channels in (width, 2 * width)
        )
        self.out = nn.Conv2d(2 * width, width, 3, padding=1)
        self.act = nn.LeakyReLU(0.1, inplace=True)

    @staticmethod
    def _halving(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, 2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.1, inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the term that is added to the spectral convolution."""
        half = self.down[0](x)
        y = self.act(self.up[0](self.down[1](half)))
        y = self.act(self.up[1](torch.cat([half, y], 1)))
        return self.out(torch.cat([x, y], 1))


class Layer(nn.Module):
    """Spectral and pointwise convolution, in a U-FNO's later half also a U-Net: [N, C, H, W]."""

    def __init__(self, width: int, modes: int, *, with_unet: bool) -> None:
        super().__init__()
        self.spectral = SpectralConvolution(width, modes)
        self.pointwise = nn.Conv2d(width, width, 1)
        self.unet = SmallUNet(width) if with_unet else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.spectral(x) + self.pointwise(x)
        return F.gelu(y if self.unet is None else y + self.unet(x))


class FourierOperator(nn.Module):
    """Lifts a field and its coordinates, mixes, projects: [N, 3, H, W] -> [N, 1, H, W]."""

    def __init__(self, *, width: int, modes: int, layers: int, unets: int = 0) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.layers = nn.Sequential(
            *(Layer(width, modes, with_unet=n >= layers - unets) for n in range(layers))
        )
        self.project = nn.Sequential(
            nn.Conv2d(width, _PROJECTED, 1), nn.GELU(), nn.Conv2d(_PROJECTED, 1, 1)
        )

    def forward(self, field: Tensor) -> Tensor:
        return self.project(self.layers(self.lift(field)))


def _example(model: nn.Module, batch: int, sides: tuple[int, int], modes: int) -> Example:
    if min(sides) < 2 * modes:
        raise BadInput(f"a grid of {sides} has no {modes} frequencies: take {2 * modes} or more")
    rows, columns = (torch.linspace(0, 1, side) for side in sides)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).expand(batch, -1, -1, -1)
    field = torch.cat([torch.randn(batch, 1, *sides), places], 1)
    return Example(model.train(), F.mse_loss, (field,), torch.randn(batch, 1, *sides))


def fno(batch: int, size: ImageSize, *, width: int, modes: int, layers: int) -> Example:
    """Return a Fourier operator on grids of `size` points; mean squared error outside the model."""
    model = FourierOperator(width=width, modes=modes, layers=layers)
    return _example(model, batch, height_and_width(size), modes)


def ufno(batch: int, size: ImageSize, *, width: int, modes: int, layers: int) -> Example:
    """Return a U-FNO, whose later half of layers has U-Nets, as `fno` does."""
    model = FourierOperator(width=width, modes=modes, layers=layers, unets=layers // 2)
    return _example(model, batch, height_and_width(size, multiple=4), modes)
