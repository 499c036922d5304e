"""Random small models from a grammar, for fuzzing: every seed is one model with its batch.

An image model is a few blocks drawn from convolutions, norms, activations, pools, residuals,
concatenations, gates, dropout, noise, buffers that are read and written, views and in-place
operations; a sequence model from linear layers (tied ones too), norms, attention and gated units.
Blocks nest and keep the shape they get, so that any combination runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.zoo import Example

__all__ = ["random_example"]

CHANNELS = 8
WIDTH = 16
_DEEPEST = 2


def random_example(seed: int) -> Example:
    """Return the model of a seed, which makes its own loss from one batch."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch = draw.choice((1, 2, 4))
    if draw.random() < 0.5:
        body, x = _blocks(draw, _IMAGE, 0), torch.randn(batch, CHANNELS, 12, 12)
    else:
        body, x = _blocks(draw, _SEQUENCE, 0), torch.randn(batch, 24, WIDTH)
    return Example(_Model(body, draw.random() < 0.3).train(), None, (x,), None)


class _Model(nn.Module):
    def __init__(self, body: nn.Module, two_heads: bool) -> None:
        super().__init__()
        self.body = body
        self.two_heads = two_heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        loss = y.square().mean()
        return loss + y.abs().sum() / y.numel() if self.two_heads else loss


def _blocks(draw: random.Random, grammar: dict[str, Callable], depth: int) -> nn.Module:
    names = list(grammar)
    if depth >= _DEEPEST:
        names = [n for n in names if n not in _NESTING]
    chosen = [draw.choice(names) for _ in range(draw.randint(1, 6 - 2 * depth))]
    made: list[nn.Module] = []
    for name in chosen:
        if made and draw.random() < 0.08:
            made.append(made[-1])  # the same module again: tied weights, two buffer updates
        else:
            made.append(grammar[name](draw, depth))
    return nn.Sequential(*made)


class Residual(nn.Module):
    """x + body(x), sometimes in place."""

    def __init__(self, body: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.body = body
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x) * 0.5
        return y.add_(x) if self.in_place else x + y


class Concatenation(nn.Module):
    """Two branches side by side, and half of the channels of what they give."""

    def __init__(self, first: nn.Module, second: nn.Module, dim: int) -> None:
        super().__init__()
        self.first = first
        self.second = second
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.first(x), self.second(x)], self.dim)
        a, b = both.chunk(2, self.dim)
        return a * torch.sigmoid(b)


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(CHANNELS, 4, 1)
        self.up = nn.Conv2d(4, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()


class RunningScale(nn.Module):
    """Reads and updates a buffer, as a moving average does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9).add_(x.abs().mean(), alpha=0.1)
        return x / (self.scale + 0.1)


class Noise(nn.Module):
    """Adds random numbers, scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.amount * torch.randn_like(x)


class Views(nn.Module):
    """Slices, flips and joins without changing the shape; writes into a view of a copy."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[self.dim] // 2
        a, b = x.narrow(self.dim, 0, half), x.narrow(self.dim, half, half)
        y = torch.cat([b, a.flip(self.dim)], self.dim)
        y.narrow(self.dim, 0, half).mul_(0.5)
        return y.transpose(1, self.dim).contiguous().transpose(1, self.dim)


class Resample(nn.Module):
    """Pools by two and scales up again."""

    def __init__(self, largest: bool, mode: str) -> None:
        super().__init__()
        self.largest = largest
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(x, 2) if self.largest else F.avg_pool2d(x, 2)
        return F.interpolate(y, scale_factor=2, mode=self.mode)


class Attention(nn.Module):
    """Self-attention, causal or not, with dropout or without."""

    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.causal = causal
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=self.dropout)
        return y.transpose(1, 2).flatten(2)


class GatedUnit(nn.Module):
    """Two projections, one gating the other."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        y = self.back(self.down(a * F.gelu(b)))
        return F.linear(y, self.back.weight.t()) if self.tied else y


def _activation(draw: random.Random, _depth: int) -> nn.Module:
    kinds = [
        nn.ReLU(),
        nn.ReLU6(),
        nn.SiLU(),
        nn.GELU(),
        nn.Hardswish(),
        nn.LeakyReLU(0.1),
        nn.Tanh(),
        nn.Softplus(),
        nn.ELU(),
    ]
    return draw.choice(kinds)


def _in_place_activation(draw: random.Random, _depth: int) -> nn.Module:
    """Return an activation over a value made for it, which it may overwrite."""
    kinds = [nn.ReLU(inplace=True), nn.Hardswish(inplace=True), nn.ELU(inplace=True)]
    return nn.Sequential(_Scaled(), draw.choice(kinds))


class _Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5


def _convolution(draw: random.Random, _depth: int) -> nn.Module:
    groups, size = draw.choice((1, 1, 2, CHANNELS)), draw.choice((1, 3))
    return nn.Conv2d(
        CHANNELS, CHANNELS, size, padding=size // 2, groups=groups, bias=draw.random() < 0.5
    )


def _image_norm(draw: random.Random, _depth: int) -> nn.Module:
    kinds = [
        nn.BatchNorm2d(CHANNELS),
        nn.BatchNorm2d(CHANNELS, affine=False),
        nn.GroupNorm(2, CHANNELS),
        nn.InstanceNorm2d(CHANNELS, affine=True),
    ]
    return draw.choice(kinds)


def _nested(kind: str, dim: int, grammar: str) -> Callable[[random.Random, int], nn.Module]:
    def make(draw: random.Random, depth: int) -> nn.Module:
        rules = _IMAGE if grammar == "image" else _SEQUENCE
        body = _blocks(draw, rules, depth + 1)
        if kind == "residual":
            return Residual(body, draw.random() < 0.3)
        return Concatenation(body, _blocks(draw, rules, depth + 1), dim)

    return make


def _dropout(draw: random.Random, _depth: int) -> nn.Module:
    return nn.Dropout(draw.choice((0.1, 0.15, 0.3, 0.5)))


_NESTING = frozenset({"residual", "concatenation"})

_IMAGE: dict[str, Callable[[random.Random, int], nn.Module]] = {
    "convolution": _convolution,
    "convolution with norm": lambda d, n: nn.Sequential(_convolution(d, n), _image_norm(d, n)),
    "norm": _image_norm,
    "activation": _activation,
    "in-place activation": _in_place_activation,
    "dropout": _dropout,
    "channel dropout": lambda d, _: nn.Dropout2d(0.2),
    "resample": lambda d, _: Resample(d.random() < 0.5, d.choice(("nearest", "bilinear"))),
    "gate": lambda d, _: Gate(),
    "buffer": lambda d, _: RunningScale(),
    "noise": lambda d, _: Noise(),
    "views": lambda d, _: Views(d.choice((1, 2, 3))),
    "residual": _nested("residual", 1, "image"),
    "concatenation": _nested("concatenation", 1, "image"),
}

_SEQUENCE: dict[str, Callable[[random.Random, int], nn.Module]] = {
    "linear": lambda d, _: nn.Linear(WIDTH, WIDTH, bias=d.random() < 0.7),
    "norm": lambda d, _: nn.LayerNorm(WIDTH) if d.random() < 0.7 else nn.RMSNorm(WIDTH),
    "activation": _activation,
    "in-place activation": _in_place_activation,
    "dropout": _dropout,
    "attention": lambda d, _: Attention(d.random() < 0.5, d.choice((0.0, 0.0, 0.2))),
    "gated unit": lambda d, _: GatedUnit(d.random() < 0.5),
    "softmax": lambda d, _: nn.Softmax(-1),
    "buffer": lambda d, _: RunningScale(),
    "noise": lambda d, _: Noise(),
    "views": lambda d, _: Views(d.choice((1, 2))),
    "residual": _nested("residual", 2, "sequence"),
    "concatenation": _nested("concatenation", 2, "sequence"),
}
