"""Small models, each with one thing that is easy to get wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from support.layouts import OnePixel, TransposedNorm
from tightfit.torch_private.releases import LEAVES, Since

PLANNED = "by one plan"
SEVERAL = "by a plan for each of several graphs"
PARTLY = "partly outside of plans"
OUTSIDE = "outside of every plan"


@dataclass(frozen=True)
class Case:
    """A model with inputs and a loss of its output."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    loss: Callable[[Any], torch.Tensor] = lambda output: output
    autocast: bool = False
    call: Callable[[nn.Module, tuple[Any, ...]], Any] = lambda model, inputs: model(*inputs)
    where: str = PLANNED
    """Where it runs, as `tightfit.report` tells."""
    before: tuple[Since, str] | None = None
    """Where it runs on a release of PyTorch that lacks something."""

    @property
    def where_here(self) -> str:
        """Where it runs on the release here."""
        if self.before is None or self.before[0].is_available:
            return self.where
        return self.before[1]


def image(batch: int = 4, channels: int = 3, size: int = 12) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8, affine=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = x + F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3))).square().mean()


class FloatNorms(nn.Module):
    """Their statistics are float where what they normalise is not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.1, inplace=True)
        )
        self.head = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 1, 1))

    def forward(self, x):
        return self.head(self.net(x)).square().mean()


class UpdatingNorm(nn.BatchNorm2d):
    """The operator by which cuDNN's BatchNorm is captured on a GPU."""

    def forward(self, x):
        return torch.ops.aten._batch_norm_with_update(
            x, self.weight, self.bias, self.running_mean, self.running_var, 0.1, self.eps
        )[0]


class UpdatingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), UpdatingNorm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), UpdatingNorm(8)
        )

    def forward(self, x):
        return self.net(x).square().mean()


class DropoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.Dropout(0.5)
        )

    def forward(self, x):
        noise = torch.randn_like(x) * 0.1 + torch.rand(x.shape[0], 1)
        h = self.net(x + noise)
        return torch.bernoulli(torch.sigmoid(h)).mul(h).sum()


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return (x + y.transpose(1, 2).reshape(2, 8, 16)).square().mean()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.act = nn.ReLU6(inplace=True)

    def forward(self, x):
        h = self.act(self.a(x))
        h = F.leaky_relu_(self.b(h) * 2) + 1
        h += x
        h[:, 0] = 0.5
        return h.mul_(2).sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        h = self.mix(self.embed(tokens)).tanh()
        return F.cross_entropy(self.head(h).view(-1, 20), tokens.view(-1))


class TiedThrice(Tied):
    def forward(self, tokens):
        h = self.mix(self.embed(tokens) + F.embedding(tokens.flip(0), self.head.weight))
        return F.cross_entropy(self.head(h).view(-1, 20), tokens.view(-1))


class MovingAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = self.a(x).relu()
        scaled = h * self.average.unsqueeze(0).clone()
        self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.calls += 1
        return (scaled + h * self.average.clone()).sum()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)
        self.body.requires_grad_(False)
        self.body.eval()

    def train(self, mode=True):
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3))).sum()


class Views(nn.Module):
    """Outputs that are views of inputs, of each other and of hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x, scale=2.0):
        h = self.a(x) * scale
        hidden = h.relu()
        return {
            "h": h,
            "t": h.t(),
            "x": x,
            "flat": x.view(-1),
            "parts": hidden.split(3, 1),
            "number": 3,
            "nothing": None,
        }


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(3, 6, 3, padding=1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.t = nn.ConvTranspose2d(6, 3, 2, 2)

    def forward(self, x):
        h = self.c(x)
        h = F.max_pool2d(h, 3, 2, 1) + F.adaptive_avg_pool2d(h, 6) + F.avg_pool2d(h, 2)
        h = self.t(F.group_norm(self.up(h), 2))
        return F.interpolate(h, size=7, mode="nearest").square().mean()


class SharedGradient(nn.Module):
    """Parameters whose gradients are one tensor, an expanded scalar, or have other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 4))
        self.b = nn.Parameter(torch.randn(5, 4))
        self.c = nn.Parameter(torch.randn(4))
        self.d = nn.Parameter(torch.randn(4, 5))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return (self.a + self.b + self.d.t()).mul(x).sum() + self.c.sum()


@dataclass(frozen=True)
class Detection:
    """A plain dataclass, as detection models return and take."""

    scores: torch.Tensor
    boxes: Any
    classes: int = 3


class Scored(NamedTuple):
    loss: torch.Tensor
    detections: Any
    threshold: float


class Outputs(nn.Module):
    """Dataclasses, a named tuple, double precision and plain values among tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, given):
        h = self.a(given.scores)
        inner = Detection(h.double(), [given.boxes * 2, None], classes=h.shape[0])
        return Scored(h.square().sum().double(), {"all": (inner, "text", h.shape, h.dtype)}, 0.5)


class SameTwice(nn.Module):
    """One tensor returned twice, and inputs of every layout."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x, y, z):
        h = self.a(x.t() + y + z)
        return h, [h, h.view(-1)]


class Branching(nn.Module):
    """Runs one of two ways, by the values of its input, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
        self.narrow = nn.Linear(6, 6)

    def forward(self, x):
        y = self.wide(x) if x.sum() > 0 else self.narrow(x)
        return F.dropout(y, 0.3), x


class Opaque(nn.Module):
    """Blocks that run eagerly: trained, changing buffers, branching, frozen, under no_grad."""

    def __init__(self, once: bool = False) -> None:
        super().__init__()
        self.once = once
        self.a = nn.Linear(6, 6)
        self.marked = tightfit.opaque(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)))
        self.norm = tightfit.opaque(nn.BatchNorm1d(6))
        self.branch = tightfit.opaque(Branching())
        self.frozen = tightfit.opaque(nn.Linear(6, 6)).requires_grad_(False)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        h = self.marked(self.a(x))
        h = self.norm(h + x).tanh()
        y, same = self.branch(h)
        with torch.no_grad():
            scale = self.marked(x).sigmoid()
        h = self.frozen(y) * scale
        return self.head(h if self.once else h + self.marked(same)).square().mean()


class BranchInside(nn.Module):
    """A branch on data in an unmarked module."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.branches = nn.ModuleList(Branching() for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        h = self.a(x)
        for branch in self.branches:
            h = branch(h.tanh())[0]
        return self.head(h).square().mean()


class TwoNames(nn.Module):
    """One module, with a buffer it changes, registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.net = nn.Sequential(block, nn.Linear(6, 6), block)

    def forward(self, x):
        return self.net(x).square().mean()


class OwnGenerators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.first = torch.Generator().manual_seed(3)
        self.second = torch.Generator().manual_seed(4)

    def forward(self, x):
        noise = torch.rand(6, generator=self.first) * torch.rand(6)
        return (self.a(x) * noise * torch.rand(6, generator=self.second)).square().mean()


class WeightUsedTwice(nn.Module):
    """Eager casts the weight once and adds up its gradients in low precision."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.inside = inside

    def autocast(self):
        if self.inside:
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def forward(self, x):
        with self.autocast():
            h = self.a(self.a(self.a(x).tanh()))
        with self.autocast():
            return (self.a(self.a(h)) * self.a.weight.sum()).float().square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.3, bidirectional=True)
        self.gru = nn.GRU(16, 8)
        self.rnn = nn.RNN(8, 4)
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x, state):
        h, _ = self.lstm(self.embed(x).tanh())
        h, state = self.gru(h, state)
        h, last = self.rnn(h)
        h, c = self.cell(h[-1], (last[0], last[0]))
        return (h * c).sum() + state.square().mean()


class WeightDrop(nn.Module):
    """A recurrent module whose weight is another one in every call, as in AWD-LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, 2)
        self.raw = nn.Parameter(self.rnn._parameters.pop("weight_hh_l0").detach())
        self.rnn.flatten_parameters = lambda: None

    def forward(self, x):
        self.rnn.weight_hh_l0 = F.dropout(self.raw, 0.5, self.training)
        h, (last, _) = self.rnn(x)
        return h.square().mean() + last.mean()


class ResizedMask(nn.Module):
    """Makes its mask of an empty tensor, as code before `torch.empty_like` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x)
        rows = x.data.new().resize_((x.size(0), 1)).bernoulli_(0.5).expand_as(h)
        each = x.data.new().resize_as_(h).bernoulli_(0.5)
        return (self.second(h * rows) * each).square().mean()


class Packed(nn.Module):
    """Takes a packed sequence and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h, _ = self.lstm(x)
        return h._replace(data=self.head(h.data).tanh())


def views_loss(out: Any) -> torch.Tensor:
    return out["h"].sum() + (out["t"] * 2).sum() + sum(p.square().sum() for p in out["parts"])


class StateSpace(nn.Module):
    """Convolves with a kernel out of complex poles: gradients come as conjugated views."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.decay = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8, 4))
        self.turn, self.gains = nn.Parameter(torch.rand(8, 4)), nn.Parameter(torch.rand(8, 4, 2))

    def forward(self, x):
        gains = torch.view_as_complex(self.gains)
        poles = -torch.exp(self.decay) + 1j * self.turn
        scaled = poles * torch.exp(self.step).unsqueeze(-1)
        powers = torch.exp(scaled.unsqueeze(-1) * torch.arange(x.size(-1)))
        gains = gains * (torch.exp(scaled) - 1.0) / poles
        kernel = 2 * torch.einsum("hn,hnl->hl", gains, powers).real
        spectrum = torch.fft.rfft(x, n=32) * torch.fft.rfft(kernel, n=32)
        return x + torch.fft.irfft(spectrum, n=32)[..., : x.size(-1)]


def states() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 8, 1), StateSpace(), StateSpace())


CASES = [
    Case("batch norm", BatchNormNet, lambda: (image(),)),
    Case("batch norm as cuDNN's is captured", UpdatingNet, lambda: (image(),)),
    Case("dropout and random ops", DropoutNet, lambda: (torch.randn(8, 16),)),
    Case("attention", lambda: Attention(0.0), lambda: (torch.randn(2, 8, 16),)),
    Case("attention with dropout", lambda: Attention(0.2), lambda: (torch.randn(2, 8, 16),)),
    Case("in-place operators", InPlace, lambda: (torch.randn(4, 16),)),
    Case("tied weights", Tied, lambda: (torch.randint(0, 20, (3, 7)),)),
    Case("weight used three times", TiedThrice, lambda: (torch.randint(0, 20, (3, 7)),)),
    Case("mutated buffers", MovingAverage, lambda: (torch.randn(4, 16),)),
    Case("state-space kernels", states, lambda: (torch.randn(4, 1, 16),), torch.sum),
    Case("frozen parameters", Frozen, lambda: (image(),)),
    Case("outputs that are views", Views, lambda: (torch.randn(4, 6),), views_loss),
    Case("pools and upsampling", Pools, lambda: (image(),)),
    Case("BatchNorm of a transposed input", TransposedNorm, lambda: (torch.randn(4, 24, 16),)),
    Case("images of one pixel", OnePixel, lambda: (image(size=6),)),
    Case(
        "the same output twice, inputs of other layouts",
        SameTwice,
        lambda: (torch.randn(6, 4), torch.randn(1, 6).expand(4, 6), torch.randn(8, 6)[::2]),
        lambda out: out[0].sum() + out[1][0].mean() + out[1][1].square().sum(),
    ),
    Case("opaque modules", Opaque, lambda: (torch.randn(8, 6),), before=(LEAVES, SEVERAL)),
    Case(
        "opaque modules under autocast",
        lambda: Opaque(once=True),
        lambda: (torch.randn(8, 6),),
        autocast=True,
        before=(LEAVES, SEVERAL),
    ),
    Case("one module under two names", TwoNames, lambda: (torch.randn(8, 6),)),
    Case("generators of its own", OwnGenerators, lambda: (torch.randn(8, 6),), where=SEVERAL),
    Case(
        "a weight with several readers under autocast",
        lambda: WeightUsedTwice(False),
        lambda: (torch.randn(8, 6),),
        autocast=True,
    ),
    Case(
        "a weight with several readers, autocast inside",
        lambda: WeightUsedTwice(True),
        lambda: (torch.randn(8, 6),),
    ),
    Case(
        "a branch on data inside a module", BranchInside, lambda: (torch.randn(8, 6),), where=PARTLY
    ),
    Case(
        "recurrent modules",
        Recurrent,
        lambda: (torch.randn(5, 3, 6), torch.randn(1, 3, 8, requires_grad=True)),
    ),
    Case("a recurrent module of computed weights", WeightDrop, lambda: (torch.randn(5, 3, 6),)),
    Case("masks made of empty tensors", ResizedMask, lambda: (torch.randn(4, 8),), where=SEVERAL),
    Case(
        "packed sequences",
        Packed,
        lambda: (nn.utils.rnn.pack_sequence([torch.randn(n, 6) for n in (4, 3, 2)]),),
        lambda out: out.data.square().sum(),
        where=PARTLY,
    ),
    Case(
        "dataclasses, named tuples and plain values",
        Outputs,
        lambda: (Detection(torch.randn(3, 6), torch.randn(3)),),
        lambda out: out.loss,
    ),
    Case("gradients that share memory", SharedGradient, lambda: (torch.randn(5, 4),)),
    Case("autocast bf16", BatchNormNet, lambda: (image(),), autocast=True),
    Case("autocast bf16, norms with float weights", FloatNorms, lambda: (image(),), autocast=True),
    Case(
        "autocast bf16 attention",
        lambda: Attention(0.1),
        lambda: (torch.randn(2, 8, 16),),
        autocast=True,
    ),
    Case(
        "input that requires a gradient",
        lambda: Attention(0.0),
        lambda: (torch.randn(2, 8, 16, requires_grad=True),),
    ),
]


EXECUTED = (
    "batch norm",
    "dropout and random ops",
    "attention",
    "in-place operators",
    "tied weights",
    "pools and upsampling",
    "opaque modules",
    "recurrent modules",
)
"""The features of models whose random plans are run, with values moved there and back, too."""
