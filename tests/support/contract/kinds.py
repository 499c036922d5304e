"""Kinds of outputs, inputs that come by keyword, what needs no gradient, and small budgets."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from support.contract.aliases import net
from support.contract.inputs import data, given, inner, leaf
from support.contract.outputs import Net, OutputCase


@dataclasses.dataclass
class Output:
    """What libraries return of a model."""

    loss: torch.Tensor
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    note: str | None = None


class Pair(NamedTuple):
    """A tuple with names."""

    value: torch.Tensor
    label: torch.Tensor


class Fields(collections.OrderedDict):
    """A dictionary whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def containers() -> list[OutputCase]:
    """Containers, and what is no tensor."""

    def dataclass(s: Net, x: torch.Tensor) -> Any:
        z = s.a(x)
        return Output(z.sum(), z, (z.detach(), z[1:]), "trained")

    def named(s: Net, x: torch.Tensor) -> Any:
        z = s.a(x)
        return Pair(z, z.argmax(1))

    def nested(s: Net, x: torch.Tensor) -> Any:
        z = s.a(x)
        return {"a": [z, (z.sum(), {"b": z.t()})], "c": ((), [], {}), "d": None}

    def fields(s: Net, x: torch.Tensor) -> Any:
        z = s.a(x)
        return Fields(loss=z.sum(), logits=z, detached=z.detach())

    def grown(s: Net, x: torch.Tensor) -> Any:
        found = collections.defaultdict(list)
        for layer in (s.a, s.b):
            x = layer(x)
            found["hidden"].append(x)
        return found

    return [
        net("a dataclass", dataclass),
        net("a named tuple", named),
        net("nested containers, some of them empty", nested),
        net("a dictionary with attributes", fields),
        net("a defaultdict of lists", grown),
        net("None beside a tensor", lambda s, x: (None, s.a(x), None)),
        net("numbers and text beside a tensor", lambda s, x: (s.a(x), 3, 2.5, True, "text")),
        net("a shape, a dtype and a device", lambda s, x: (s.a(x), x.shape, x.dtype, x.device)),
        net("a tensor's size as a number", lambda s, x: (s.a(x), x.numel(), len(x))),
        net("results of max with names", lambda s, x: s.a(x).max(1)),
        net(
            "results of topk, and views of them",
            lambda s, x: (lambda t: (t, t.values[:, :1]))(s.a(x).topk(3)),
        ),
        net("a slice and a range", lambda s, x: (s.a(x), slice(1, 3), range(4))),
        net(
            "a list that was an input",
            lambda s, x, more: (s.a(x), more),
            data,
            lambda: [torch.ones(2), 3],
        ),
        net("a generator's tuple", lambda s, x: tuple(layer(x) for layer in (s.a, s.b))),
        net("a set of numbers", lambda s, x: (s.a(x), {1, 2})),
    ]


def without_gradient() -> list[OutputCase]:
    """Outputs that need no gradient, of other dtypes, of no size."""

    def parts(s: Net, x: torch.Tensor) -> Any:
        z = s.a(x)
        return z, z.argmax(1), z > 0, z.detach().round().to(torch.int64)

    def under_no_grad(s: Net, x: torch.Tensor) -> Any:
        with torch.no_grad():
            frozen = s.b(x)
        return s.a(x), frozen, frozen[1:]

    def enabled(s: Net, x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = s.b(x)
            with torch.enable_grad():
                z = s.a(x)
        return y, z

    def frozen() -> nn.Module:
        made = Net(lambda s, x: (s.b(x), s.a(x)))
        made.b.requires_grad_(False)
        return made

    def evaluated(s: Net, x: torch.Tensor) -> Any:
        return s.a(x).requires_grad, s.a(x), torch.is_grad_enabled()

    def required(s: Net, x: torch.Tensor) -> Any:
        made = torch.ones(4, 8).requires_grad_()
        return s.a(x), made

    def index(s: Net, x: torch.Tensor) -> Any:
        order = x.sum(1).argsort()
        return s.a(x)[order], order, order.view(2, 2)

    def no_loss(outputs: Any) -> torch.Tensor:
        return outputs[0].sum()

    return [
        net("an index, a mask and rounded values", parts),
        net("results under no_grad and their view", under_no_grad),
        net("enable_grad in no_grad", enabled),
        net("whether a result needs a gradient", evaluated),
        net("a tensor made inside that needs a gradient", required),
        net("an order, its view and what it orders", index),
        net("a tensor made inside", lambda s, x: (s.a(x), torch.arange(4), torch.zeros(2))),
        net("a random tensor made inside", lambda s, x: (s.a(x), torch.randn(4))),
        net("an empty tensor", lambda s, x: (s.a(x), s.a(x)[:0], torch.empty(0))),
        net("a number as a tensor", lambda s, x: (s.a(x).sum(), torch.tensor(3.0))),
        net(
            "double, half and complex",
            lambda s, x: (lambda z: (z.double(), z.bfloat16(), torch.complex(z, z)))(s.a(x)),
        ),
        net("an output no loss reads", lambda s, x: (s.a(x), s.b(x)), loss=no_loss),
        net("a view no loss reads", lambda s, x: (lambda z: (z, z[1:]))(s.a(x)), loss=no_loss),
        net("a loss of the view only", lambda s, x: (lambda z: (z[1:], z))(s.a(x)), loss=no_loss),
        net(
            "a channels-last result",
            lambda s, x: F.pad(s.a(x).view(1, 4, 2, 4), (1, 1)).to(
                memory_format=torch.channels_last
            ),
        ),
        net("nothing needs a gradient", lambda s, x: (x * 2, x[1:])),
        net("nothing but a number", lambda s, x: len(x)),
        net("an integer batch alone", lambda s, x: x + 1, lambda: torch.arange(4)),
        OutputCase("the output of a frozen layer", frozen),
    ]


def by_keyword() -> list[OutputCase]:
    """Inputs by keyword, that are missing, that are no tensors."""

    def use(call: Any, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return call(x, other=y)

    def both(s: Net, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        return (s.a(x), None) if other is None else (s.a(x) * other, other)

    return [
        OutputCase("an input by keyword, returned", lambda: Net(both), given(data, leaf), use=use),
        net("an input that is missing", both),
        net(
            "a list of inputs, one returned",
            lambda s, xs: (s.a(xs[0]), xs[1], xs),
            lambda: [leaf(), inner()],
        ),
        net("a number that is an input", lambda s, x, n: (s.a(x) * n, n), data, lambda: 3),
        net(
            "inputs with and without gradient",
            lambda s, x, y, z: (s.a(x) * y + z, y[1:], z.t()),
            data,
            leaf,
            inner,
        ),
    ]


class Counting(nn.Module):
    """A convolutional network that counts what it has seen and logs a mean."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(6)]
        self.first, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(*layers)
        self.head = nn.Linear(8, 4)
        self.seen, self.log = 0, []

    def forward(self, x):
        self.seen += len(x)
        self.log.append(float(x.mean()))
        return self.head(self.body(self.first(x)).mean((2, 3)))


def images() -> torch.Tensor:
    """Return a batch of images."""
    return torch.randn(8, 3, 16, 16)


def small_budgets() -> list[OutputCase]:
    """The shapes that fail first, where something must be computed again."""

    def deep(s: Net, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = s.b(s.a(x).tanh()).sin()
        return x

    def pair(s: Net, x: torch.Tensor) -> Any:
        z = deep(s, x)
        return z, z.detach()

    def middle(s: Net, x: torch.Tensor) -> Any:
        z = deep(s, x)
        return z[:200], z.detach(), deep(s, z)

    def changed(s: Net, x: torch.Tensor) -> Any:
        x.mul_(2)
        return deep(s, x), x[1:]

    def buffer(s: Net, x: torch.Tensor) -> Any:
        z = deep(s, x) * s.h
        s.h = 0.9 * s.h + 0.1 * z.detach().abs().mean(0)
        return z.square()

    def wide() -> torch.Tensor:
        return torch.randn(256, 8)

    forms = {
        "a result and it detached": (pair, "130KiB"),
        "views in the middle": (middle, "190KiB"),
        "an input changed and viewed": (changed, "130KiB"),
        "a buffer read, then replaced": (buffer, "130KiB"),
    }
    name = "small budget: a convolutional network that counts and logs"
    small = {"budget": "560KiB", "is_changed": False}
    return [
        *(
            net(f"small budget: {name}", function, wide, budget=budget, is_changed=False)
            for name, (function, budget) in forms.items()
        ),
        OutputCase(name, Counting, given(images), **small),
    ]


KINDS: tuple[OutputCase, ...] = (
    *containers(),
    *without_gradient(),
    *by_keyword(),
    *small_budgets(),
)
