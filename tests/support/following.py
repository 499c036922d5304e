"""Models whose Python does more than call operators, and calls with something around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrizations, parametrize, prune

from support.models import OUTSIDE, PARTLY, SEVERAL, Case
from support.wrapped import Wrapped, case, image, squares
from tightfit.torch_private.releases import CAUGHT_ERRORS


class SparseWords(nn.Module):
    """Words whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, 8)

    def forward(self, tokens):
        return self.head(self.words(tokens)).square().sum()


class SparseInputs(nn.Module):
    """Features that are mostly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.sparse.mm(x, self.weight).tanh()


class Counting(Wrapped):
    """Scales by how often it has run, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__(counted)
        self.calls, self.shapes = 0, []


def counted(self: Counting, h: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    self.shapes.append(h.shape)
    return self.b(h) * self.calls * len(self.shapes)


class Logging(Wrapped):
    """Writes numbers down."""

    def __init__(self) -> None:
        super().__init__(logged)
        self.log: list[float] = []


def logged(self: Logging, h: torch.Tensor) -> torch.Tensor:
    self.log.append(float(h.detach().mean()))
    return self.b(h) + self.log[-1]


def in_numpy(self: Wrapped, h: torch.Tensor) -> torch.Tensor:
    factors = np.exp(h.detach().numpy()).astype(np.float32)
    return self.b(h) * torch.from_numpy(factors)


def with_numbers_of_numpy(self: Wrapped, h: torch.Tensor) -> torch.Tensor:
    output = self.b(h)
    flat = output.reshape(int(np.prod(output.shape)))
    return flat * float(np.log(np.ceil(len(h) / 3) + 2)) / np.sqrt(len(flat))


def tried(self: Wrapped, h: torch.Tensor) -> torch.Tensor:
    try:
        return self.b(h.view(3, -1))
    except RuntimeError:
        return self.b(h)


def pruned() -> nn.Module:
    layer = nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


def with_another_tensor() -> nn.Module:
    """Return a model that trains a tensor of no module; its gradient goes into a buffer."""
    other = torch.ones(8, requires_grad=True)
    model = Wrapped(lambda s, h: s.b(h * other))
    model.register_buffer("seen", torch.zeros(8))
    other.register_hook(model.seen.copy_)
    return model


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(8, 8))


def keeps(self: Wrapped, h: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    kept.append(h.tanh())
    return h


def with_a_list(model: nn.Module, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    return [model(*inputs, kept), *kept]


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """Return a way to call a model within a context."""

    def call(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
        with context():
            return model(*inputs)

    return call


def in_forward_mode(model: nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor:
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0])))
        primal, tangent = forward_ad.unpack_dual(output)
    return primal * tangent


def linear_layers(**modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Wrapped(
        lambda s, h: s.c(h) if "c" in modules else s.b(h),
        **{name: make() for name, make in modules.items()},
    )


def one_image() -> tuple[torch.Tensor]:
    return (image(),)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)


FOLLOWED = [
    Case("Python state changed by forward (counters, lists)", Counting, one_image, squares),
    Case(
        "numbers written down (`self.log.append(loss.item())`)",
        Logging,
        one_image,
        squares,
        where=SEVERAL,
    ),
    case("computations in NumPy", in_numpy, where=SEVERAL),
    case("numbers computed in NumPy (`int(np.prod(x.shape))`)", with_numbers_of_numpy),
    case("errors that the forward catches", tried, before=(CAUGHT_ERRORS, PARTLY)),
    case(
        "computed numbers by which the outermost forward decides (`if loss.item() > 3:`)",
        lambda s, h: s.b(h / 2 if h.max().item() > 1e-3 else h),
        where=SEVERAL,
    ),
    Case(
        "tensors that require a gradient and belong to no module given",
        with_another_tensor,
        one_image,
        squares,
    ),
    Case(
        "containers and objects among the inputs that the forward changes",
        lambda: Wrapped(keeps),
        one_image,
        lambda outputs: sum(map(squares, outputs)),
        call=with_a_list,
    ),
    Case(
        "outputs that are objects of unknown classes",
        lambda: Wrapped(lambda s, h: {s.b(h)}),
        one_image,
        lambda outputs: sum(map(squares, outputs)),
    ),
    case(
        "compiled modules inside",
        lambda s, h: s.c(h),
        c=lambda: torch.compile(nn.Linear(8, 8), backend="eager"),
    ),
    case("scripted modules inside", lambda s, h: s.c(h), c=scripted, where=PARTLY),
    Case(
        "a norm's or pruning's hook on the outermost module itself",
        pruned,
        one_image,
        squares,
        where=PARTLY,
    ),
    Case(
        "parametrizations cached around a call (`parametrize.cached`)",
        linear_layers(c=lambda: parametrizations.weight_norm(nn.Linear(8, 8))),
        one_image,
        squares,
        call=within(parametrize.cached),
    ),
    Case(
        "sparse gradients (`Embedding(sparse=True)`)",
        SparseWords,
        lambda: (torch.randint(0, 20, (3, 4)),),
        where=PARTLY,
    ),
    Case(
        "sparse tensors as inputs",
        SparseInputs,
        lambda: (torch.randn(4, 8).relu().to_sparse(),),
        squares,
        where=OUTSIDE,
    ),
    Case(
        "nested tensors, DTensors and other tensor subclasses as inputs",
        linear_layers(),
        lambda: (jagged(),),
        lambda output: squares(output.values()),
        where=OUTSIDE,
    ),
    Case(
        "transforms of `torch.func` around a fitted model",
        linear_layers(),
        one_image,
        squares,
        call=lambda model, inputs: torch.func.vmap(model)(*inputs),
        where=OUTSIDE,
    ),
    Case(
        "forward-mode differentiation of a fitted model",
        linear_layers(),
        one_image,
        squares,
        call=in_forward_mode,
        where=OUTSIDE,
    ),
    Case(
        "hooks on tensors saved for backward (`saved_tensors_hooks`, `save_on_cpu`) around a call",
        linear_layers(),
        one_image,
        squares,
        call=within(save_on_cpu),
        where=OUTSIDE,
    ),
]
"""Where each runs is checked, too."""
