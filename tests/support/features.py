"""Features of models beyond `CASES`: what is supported, and what is refused with which words."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from support.following import FOLLOWED, pruned
from support.models import PARTLY, SEVERAL, Case
from support.wrapped import Wrapped, case, image
from support.writing import WRITING
from tightfit.errors import BadInput, TightfitError
from tightfit.torch_private.core import pytree
from tightfit.torch_private.releases import DERIVATIVES, Since


def _old_weight_norm() -> nn.Module:
    """Return a layer with the norm that PyTorch no longer recommends, and many models have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(nn.Linear(8, 8))


@torch.library.custom_op("tightfit_tests::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """A custom operator of a library."""
    return x * factor


@scale.register_fake
def _(x, factor):
    return torch.empty_like(x)


scale.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 1.1


class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (torch.fft.fft(x) @ self.weight).abs()


def hooked() -> nn.Module:
    model = Wrapped(lambda self, h: self.b(h))
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    model.b.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    model.b.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    model.b.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    return model


def checkpointed(self: Wrapped, h: torch.Tensor, *, reentrant: bool = False) -> torch.Tensor:
    def part(z):
        return self.b(F.dropout(z.tanh(), 0.3))

    return checkpoint(part, h, use_reentrant=reentrant)


class OwnCheckpoint(torch.autograd.Function):
    """Runs a function again in backward, as trainers of diffusion models did it."""

    @staticmethod
    def forward(ctx, function, inputs, *tensors):
        ctx.function, ctx.inputs, ctx.tensors = function, inputs, tensors
        with torch.no_grad():
            return function(*tensors[:inputs])

    @staticmethod
    def backward(ctx, *gradients):
        inputs = [x.detach().requires_grad_() for x in ctx.tensors[: ctx.inputs]]
        with torch.enable_grad():
            output = ctx.function(*[x.view_as(x) for x in inputs])
        wanted = [*inputs, *ctx.tensors[ctx.inputs :]]
        return None, None, *torch.autograd.grad(output, wanted, gradients, allow_unused=True)


def checkpointed_by_hand(self: Wrapped, h: torch.Tensor) -> torch.Tensor:
    return OwnCheckpoint.apply(lambda z: self.b(z.tanh()), 1, h, *self.b.parameters())


class _Scored(NamedTuple):
    values: torch.Tensor
    factor: float


class Scored(_Scored):
    """A named tuple with a constructor of its own, as packed sequences have one."""

    def __new__(cls, values: torch.Tensor, factor: float = 2.0) -> Scored:
        return super().__new__(cls, values, factor)


def scaled_terms(self: Wrapped, h: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    mean = h.detach().mean(0)
    average = average.mul(0.9).add_(mean, alpha=0.1).sub_(mean, alpha=0.37)
    average.addcdiv_(mean, mean.abs() + 1, value=0.3).addcmul_(mean, mean, value=-0.7)
    return torch.addcdiv(self.b(h) * average, h, average.abs() + 1, value=0.7)


def partly_without_gradient(self: Wrapped, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = self.b(h)
    return h * factor


def branches(self: Wrapped, h: torch.Tensor) -> torch.Tensor:
    return self.b(h) if h.sum() > 0 else h


def packs(self: Wrapped, h: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(h, lengths, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(self.c(packed)[0])[0]


TABLE = torch.ones(8)


@functools.cache
def cached_table(size: int) -> torch.Tensor:
    return torch.arange(size).float()


def uses_table(self: Wrapped, h: torch.Tensor) -> torch.Tensor:
    return self.b(h * TABLE) + cached_table(8)


def sets_up(self: Wrapped, h: torch.Tensor) -> torch.Tensor:
    self.last_dtype = h.dtype
    return self.b(h)


class Recounting(Wrapped):
    """Counts its calls, and scales by a computed number: neither can lie in a graph."""

    def __init__(self) -> None:
        super().__init__(lambda s, h: h)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.a(x)
        return self.block(h) / float(h.detach().norm()) * self.calls


class FakeQuantized(nn.Module):
    """Weights rounded per channel, by scales that take their shape in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("lowest", torch.tensor([]))
        self.register_buffer("highest", torch.tensor([]))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero_point", torch.zeros(1, dtype=torch.int))
        self.register_buffer("enabled", torch.ones(1, dtype=torch.long))

    def forward(self, x):
        ranges = self.lowest, self.highest, self.scale, self.zero_point
        weight = torch.fused_moving_avg_obs_fake_quant(
            self.weight, self.enabled, self.enabled, *ranges, 0.01, -128, 127, 0, True, True
        )
        return F.linear(x, weight).tanh()


class Remembers(nn.Module):
    """Computes a norm once, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.norm: torch.Tensor | None = None

    def forward(self, x, edges):
        if self.norm is None:
            self.norm = torch.zeros(8).index_add(0, edges, torch.ones(len(edges)))
        return (self.a(x) * self.norm).tanh()


class Keys:
    """A cache: nothing but what it holds."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.layers = [keys]


SUPPORTED = [
    case("`torch.func.vmap`", lambda s, h: torch.func.vmap(lambda r: s.b(r).tanh())(h)),
    case("`torch.func.grad`", lambda s, h: torch.func.grad(lambda z: s.b(z).square().sum())(h)),
    case("`torch.func.jvp`", lambda s, h: torch.func.jvp(s.b, (h,), (h,))[1]),
    case(
        "`torch.func.functional_call`",
        lambda s, h: torch.func.functional_call(s.b, {"weight": s.b.weight * 2}, (h,)),
    ),
    case(
        "gradients inside forward (gradient penalty)",
        lambda s, h: torch.autograd.grad(s.b(h).square().sum(), h, create_graph=True)[0],
        before=(DERIVATIVES, PARTLY),
    ),
    case("Jacobians inside forward", lambda s, h: torch.func.jacrev(s.b)(h[0]) * s.b(h).sum()),
    Case(
        "outputs that are detached aliases of others",
        lambda: Wrapped(lambda s, h: (s.b(h).T, h.detach(), h)),
        lambda: (torch.randn(4, 8),),
        lambda output: (output[0].T * output[1]).sum() + output[2].sum(),
    ),
    case("registered custom operators", lambda s, h: s.b(scale(h, 2.0))),
    case("custom `autograd.Function`", lambda s, h: s.b(Sine.apply(h))),
    Case(
        "complex numbers and Fourier transforms",
        ComplexWeights,
        lambda: (torch.randn(4, 8),),
        lambda output: output.sum(),
    ),
    case("pruning (`nn.utils.prune`)", lambda s, h: s.c(h), c=pruned),
    case(
        "spectral norm (`nn.utils.spectral_norm`)",
        lambda s, h: s.c(h),
        c=lambda: spectral_norm(nn.Linear(8, 8)),
    ),
    case(
        "weight norm (`nn.utils.weight_norm`)",
        lambda s, h: s.c(h),
        c=_old_weight_norm,
    ),
    case(
        "parametrizations: spectral norm",
        lambda s, h: s.c(h),
        c=lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    ),
    case(
        "parametrizations: weight norm",
        lambda s, h: s.c(h),
        c=lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    ),
    case(
        "parametrizations: orthogonal",
        lambda s, h: s.c(h),
        c=lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    ),
    Case(
        "forward, backward and full-backward hooks",
        hooked,
        lambda: (torch.randn(4, 8),),
        lambda output: output.square().sum(),
        where=SEVERAL,
    ),
    case(
        "hooks on hidden tensors",
        lambda s, h: (h.register_hook(lambda gradient: gradient * 2), s.b(h))[1],
    ),
    case(
        "arguments that are no tensors",
        lambda s, h, factor, mode: s.b(h) * factor if mode == "scaled" else h,
        image,
        lambda: 2.5,
        lambda: "scaled",
    ),
    Case(
        "named tuples with a value replaced",
        lambda: Wrapped(lambda s, h: Scored(h)._replace(values=s.b(h))),
        lambda: (torch.randn(4, 8),),
        lambda output: (output.values * output.factor).sum(),
    ),
    case("operators that scale what they add", scaled_terms, image, lambda: torch.rand(8)),
    case("`torch.utils.checkpoint` inside", checkpointed),
    case("reentrant checkpoints", functools.partial(checkpointed, reentrant=True)),
    case("checkpoint functions of one's own", checkpointed_by_hand, before=(DERIVATIVES, PARTLY)),
    case(
        "multi-head attention",
        lambda s, h: s.c(h, h, h)[0],
        c=lambda: nn.MultiheadAttention(8, 2, dropout=0.1),
    ),
    case("autograd switched off for a part", partly_without_gradient),
    case("inputs changed in place", lambda s, h, y: s.b(h) + y.add_(1), image, image),
    case("unused parameters", lambda s, h: h.tanh()),
    case("linear algebra", lambda s, h: torch.linalg.svdvals(s.b(h))),
    case("a branch on computed values in the outermost forward", branches, where=SEVERAL),
    case(
        "selections by computed masks",
        lambda s, h: s.b(h[h.sum(1) > 0]) + h.masked_select(h > 0).sum(),
        where=SEVERAL,
    ),
    Case(
        "packing and unpacking in the outermost forward",
        lambda: Wrapped(packs, c=nn.LSTM(8, 8)),
        lambda: (torch.randn(4, 3, 8), torch.tensor([2, 4, 1])),
        lambda output: output.square().sum(),
        where=PARTLY,
    ),
    case("tensors that are neither parameter, buffer nor input", uses_table),
    Case(
        "models that allow no single graph, part by part",
        Recounting,
        lambda: (torch.randn(4, 8),),
        lambda output: output.square().sum(),
        where=SEVERAL,
    ),
    case("attributes that a forward gives its module when it first runs", sets_up),
    Case(
        "buffers that take another shape (fake quantization)",
        FakeQuantized,
        lambda: (torch.randn(4, 8),),
        lambda output: output.square().sum(),
    ),
    Case(
        "tensors that a forward computes once and keeps",
        Remembers,
        lambda: (torch.randn(4, 8), torch.randint(0, 8, (20,))),
        lambda output: output.square().sum(),
    ),
    Case(
        "objects that hold tensors (caches of keys and values)",
        lambda: Wrapped(lambda s, h, cache: Keys(s.b(h) * cache.layers[0])),
        lambda: (torch.randn(4, 8), Keys(torch.randn(4, 8))),
        lambda cache: cache.layers[0].square().sum(),
    ),
    case("sorting and indexing", lambda s, h: s.b(h).sort(1)[0][torch.randperm(4)]),
    *WRITING,
    *FOLLOWED,
]
"""Checked with three steps each; those in `CASES` also with random plans."""


Training = Callable[[Callable[[nn.Module], nn.Module]], Any]
"""A step, given what fits a model; returns what its loss is made of, if not already derived."""


@dataclass(frozen=True)
class Refused:
    """Something that is refused: how, the ways out that the message names, and one of them."""

    name: str
    run: Training
    error: type[Exception]
    message: str
    way_out: str
    instead: Training | None = None  # where another test trains so
    needs: Since | None = None  # what the way out needs of PyTorch


def called(make: Callable[[], nn.Module], *inputs: Callable[[], Any]):
    """Return what fits a model and calls it."""
    makers = inputs or (lambda: torch.randn(4, 8),)
    return lambda fit: fit(make())(*(m() for m in makers))


class Calls(nn.Module):
    """Scales by how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


def second_backward(fit):
    loss = fit(Wrapped(lambda s, h: s.c(s.b(h)), c=Calls()))(torch.randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def differentiated_twice(fit):
    model = fit(Wrapped(lambda s, h: s.c(s.b(h)), c=Calls()))
    model(torch.randn(4, 8)).sum().backward(create_graph=True)


def losses_summed(fit):
    loss = fit(Wrapped(lambda s, h: s.c(s.b(h)), c=Calls()))(torch.randn(4, 8)).sum()
    (loss + loss).backward()


def penalised(self: Wrapped, h: torch.Tensor) -> torch.Tensor:
    loss = self.b(h).square().sum()
    return torch.autograd.grad(loss, h, create_graph=True)[0]


def wrapped_when_fitted(fit):
    model = nn.DataParallel(fit(nn.Linear(8, 8)))
    return torch.compile(model, backend="eager")(torch.randn(4, 8))


def called_once(fit):
    model, x = nn.Sequential(nn.LazyLinear(8)), torch.randn(4, 8)
    with torch.no_grad():
        model(x)
    return fit(model)(x)


REFUSED = [
    Refused(
        "compiled or wrapped models",
        called(lambda: nn.DataParallel(nn.Linear(8, 8))),
        BadInput,
        "fit the inner module first",
        "fit the inner module, then wrap it",
        wrapped_when_fitted,
    ),
    Refused(
        "scripted models",
        called(lambda: torch.jit.script(nn.Linear(8, 8))),
        BadInput,
        "the model is scripted.*PYTORCH_JIT=0",
        "fit the plain module (`PYTORCH_JIT=0` leaves it plain)",
        called(lambda: nn.Linear(8, 8)),
    ),
    Refused(
        "lazy modules that have no weights yet",
        called(lambda: nn.Sequential(nn.LazyLinear(8))),
        BadInput,
        "'0'.*no weights yet.*Call the model once",
        "call the model once before `fit`",
        called_once,
    ),
    Refused(
        "FSDP1 (`FullyShardedDataParallel`)",
        called(lambda: type("FullyShardedDataParallel", (nn.Linear,), {})(8, 8)),
        BadInput,
        "FSDP1.*fully_shard",
        "FSDP2 (`fully_shard`), then fit",
    ),
    Refused(
        "a second backward (`retain_graph`) where the forward reads buffers that it writes, or "
        "its parameters are spread over processes (`fully_shard`)",
        second_backward,
        TightfitError,
        "further time.*sum the losses",
        "call the model again, or sum the losses",
        losses_summed,
    ),
    Refused(
        "differentiating the backward (`create_graph` outside) where the forward reads buffers "
        "that it writes",
        differentiated_twice,
        TightfitError,
        "create_graph.*unfit",
        "gradients inside forward; or leave that part out",
        called(lambda: Wrapped(penalised)),
        DERIVATIVES,
    ),
]


def trained(
    step: Training, fit: Callable[[nn.Module], nn.Module] | None = None
) -> list[torch.Tensor]:
    """Return the losses, gradients, parameters and buffers of three steps."""
    torch.manual_seed(0)
    made: list[nn.Module] = []

    def first(model: nn.Module) -> nn.Module:
        if not made:
            made.append(model if fit is None else fit(model))
        return made[0]

    found: list[torch.Tensor] = []
    optimizer = None
    for _ in range(3):
        outputs = [t for t in pytree.tree_leaves(step(first)) if _trains(t)]
        loss = sum(t.square().sum() for t in outputs)
        if outputs:
            loss.backward()
            found.append(loss.detach().clone())
        members = [*made[0].parameters()]
        found += [p.grad.detach().clone() for p in members if p.grad is not None]
        if members:
            optimizer = optimizer or torch.optim.SGD(members, lr=0.1, momentum=0.9)
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(t.detach().clone() for t in made[0].state_dict().values())]


def _trains(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


UNCOMPILED = {
    "opaque modules": "'marked'.*eagerly",
    "opaque modules under autocast": "'marked'.*eagerly",
    "recurrent modules": "eagerly",
    "a recurrent module of computed weights": "eagerly",
}
"""What is supported but not with ``compile=True``: the name of the case, the message."""
