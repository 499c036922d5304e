"""Outputs that alias inputs, intermediates, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support.contract.inputs import complex_data, data, every_other_conjugated, given, inner, leaf
from support.contract.outputs import Net, OutputCase

Function = Callable[..., Any]


def net(name: str, function: Function, *makers: Callable[[], Any], **options: Any) -> OutputCase:
    """Return a case of a function of `Net` and of inputs, by default a batch without gradient."""
    inputs = given(*(makers or (data,)))
    return OutputCase(name, lambda: Net(function), inputs, **options)


def silently(view: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Return what makes a view under no_grad."""

    def make(z: torch.Tensor) -> Any:
        with torch.no_grad():
            return view(z)

    return make


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "as_strided": lambda z: z.as_strided((3, 4), (8, 2), 1),
    "chunk": lambda z: z.chunk(2, 1),
    "diagonal": lambda z: z.diagonal(),
    "expand": lambda z: z[:1].expand(4, 8),
    "movedim": lambda z: z.view(2, 2, 8).movedim(2, 0),
    "narrow of a transpose": lambda z: z.t().narrow(0, 1, 3),
    "select": lambda z: z.select(1, 2),
    "split": lambda z: z.split([1, 3]),
    "squeeze": lambda z: z.unsqueeze(1).squeeze(1),
    "steps of a slice": lambda z: z[::2, 1::3],
    "transpose": lambda z: z.transpose(0, 1),
    "unbind": lambda z: z.unbind(),
    "unfold": lambda z: z.unfold(1, 3, 2),
    "view": lambda z: z.view(2, 16),
    "view_as_complex": lambda z: torch.view_as_complex(z.view(4, 4, 2)),
    "view of another dtype": lambda z: z.detach().view(torch.int32),
}
COMPLEX_VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view_as_real": torch.view_as_real,
    "real": torch.real,
    "imag": torch.imag,
    "real and imag": lambda z: (z.real, z.imag),
    "conj": lambda z: z.conj(),
    "conj, and its imag": lambda z: (z.conj(), z.conj().imag),
}
OF_INPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the input": lambda x: x,
    "a view of the input": lambda x: x.view(-1),
    "a view of a view of the input": lambda x: x.t()[1:4],
    "the input detached": lambda x: x.detach(),
    "a view of the input, made under no_grad": silently(lambda x: x.view(-1)),
    "two views of the input": lambda x: (x[:3], x.t()),
    "the input and its view": lambda x: (x, x.view(-1)),
    "the input, its view and it detached": lambda x: (x, x[1:], x.detach()),
    "chunks of the input": lambda x: x.chunk(2),
}
"""Next to the output of a layer, for three kinds of inputs."""
KINDS = {"data": data, "a leaf": leaf, "computed": inner}


def of_inputs() -> list[OutputCase]:
    """Outputs that are inputs, or views of them."""

    def with_layer(view: Callable[[torch.Tensor], Any]) -> Function:
        return lambda s, x: (s.a(x), view(x))

    crossed = [
        net(f"{name} ({kind})", with_layer(view), make)
        for name, view in OF_INPUTS.items()
        for kind, make in KINDS.items()
    ]
    return [
        *crossed,
        net("data of the input (a leaf)", lambda s, x: (s.a(x), x.data), leaf),
        net("two inputs, swapped", lambda s, x, y: (y, x, s.a(x)), leaf, leaf),
        net("a view of one input, another input", lambda s, x, y: (x[1:], y, s.a(y)), leaf, inner),
        net("contiguous() of the input", lambda s, x: (x.contiguous(), s.a(x)), leaf),
        net("reshape of the input to its shape", lambda s, x: (x.reshape(4, 8), s.a(x)), leaf),
        net("to() of the input's own dtype", lambda s, x: (x.to(torch.float32), s.a(x)), leaf),
        net("the input transposed twice", lambda s, x: (x.t().t(), s.a(x)), leaf),
        net("the input expanded", lambda s, x: (x.expand(2, 4, 8), s.a(x)), leaf),
        net("the input as_strided", lambda s, x: (x.as_strided((2, 4), (4, 1), 3), s.a(x)), leaf),
        net(
            "view_as_real of a complex input",
            lambda s, x: (torch.view_as_real(x), s.a(x.real)),
            complex_data,
        ),
        net("conj of a complex input", lambda s, x: (x.conj(), s.a(x.real)), complex_data),
        OutputCase(
            "a complex input, conjugated in every other step",
            lambda: Net(lambda s, x: s.a(x.real) * x.imag),
            every_other_conjugated,
        ),
        net("the input and it plus one", lambda s, x: (x, x + 1, s.a(x)), leaf),
        net("the input through Identity", lambda s, x: (nn.Identity()(x), s.a(x)), leaf),
        net(
            "the input through dropout without chance",
            lambda s, x: (torch.dropout(x, 0.5, False), s.a(x)),
            leaf,
        ),
        net("the input alone", lambda s, x: x, leaf),
        net("a view of the input alone", lambda s, x: x[1:], leaf),
    ]


def of_intermediates() -> list[OutputCase]:
    """Outputs that are views of something computed, alone and with what they are views of."""

    def alone(view: Callable[[torch.Tensor], Any]) -> Function:
        return lambda s, x: view(s.a(x))

    def with_base(view: Callable[[torch.Tensor], Any]) -> Function:
        def function(s: Net, x: torch.Tensor) -> Any:
            z = s.a(x)
            return z, view(z)

        return function

    def of_complex(view: Callable[[torch.Tensor], Any]) -> Function:
        return lambda s, x: view(torch.complex(s.a(x), s.b(x)))

    def complex_with_base(view: Callable[[torch.Tensor], Any]) -> Function:
        def function(s: Net, x: torch.Tensor) -> Any:
            z = torch.complex(s.a(x), s.b(x))
            return z, view(z)

        return function

    def of(make: Callable[[torch.Tensor], Any]) -> Function:
        return lambda s, x: make(s.a(x))

    return [
        *(net(f"{name} of a result", alone(view)) for name, view in VIEWS.items()),
        *(net(f"a result and its {name}", with_base(view)) for name, view in VIEWS.items()),
        *(net(f"{name} of a complex result", of_complex(v)) for name, v in COMPLEX_VIEWS.items()),
        *(
            net(f"a complex result and its {name}", complex_with_base(v))
            for name, v in COMPLEX_VIEWS.items()
        ),
        net("two views of a result that is no output", of(lambda z: (z[:2], z[2:]))),
        net("two views of one view", of(lambda z: (z.t()[:4], z.t()[4:]))),
        net("a view and its own view", of(lambda z: (lambda v: (v, v[1:]))(z.view(8, 4)))),
        net("a view and its square", of(lambda z: (z.view(-1), z.square()))),
        net("views of two results", lambda s, x: (s.a(x)[1:], s.b(x).t())),
        net("a view, detached, and its view", of(lambda z: (z.view(-1), z.view(-1).detach()[3:]))),
        net("a detached result alone, beside a sum", of(lambda z: (z.detach(), z.sum()))),
        net("two detached aliases, beside a sum", of(lambda z: (z.detach(), z.detach(), z.sum()))),
        net(
            "a detached view and a view under no_grad",
            of(lambda z: (z.detach()[1:], silently(lambda y: y.t())(z), z.sum())),
        ),
        net("a result three times", of(lambda z: (z, [z], {"again": z}))),
        net("a view three times", of(lambda z: (lambda v: (v, [v], {"again": v}))(z.t()))),
        net("two equal views", of(lambda z: (z.view(-1), z.view(-1)))),
        net("a result's detached alias changed inside", of(changed_alias)),
        net("a result's view changed inside", of(changed_view)),
        net("a result changed inside, and its earlier view", of(changed_base)),
        net("a view of a tensor made inside", lambda s, x: (torch.ones(4, 8)[1:], s.a(x))),
        net(
            "a view of a tensor made inside and it",
            lambda s, x: (lambda c: (c, c[1:], s.a(x)))(torch.ones(4, 8)),
        ),
        net("a split and the rest of it", of(lambda z: (z.split(2, 1)[1], z.split(2, 1)[3]))),
        net("unbind, stacked again", of(lambda z: (torch.stack(z.unbind()), z.unbind()[0]))),
        net("an as_strided view that overlaps itself", of(lambda z: z.as_strided((6, 4), (4, 2)))),
        net("a view through an autograd.Function", of(lambda z: (Viewed.apply(z), z.sum()))),
    ]


class Viewed(torch.autograd.Function):
    """Returns a view of its input."""

    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(4, 8) * 2


def changed_alias(z: torch.Tensor) -> Any:
    """Change a detached alias in place."""
    z = z * 1
    alias = z.detach()
    alias.mul_(2)
    return z, alias


def changed_view(z: torch.Tensor) -> Any:
    """Change a view in place."""
    z = z * 1
    view = z[1:]
    view.mul_(2)
    return z, view


def changed_base(z: torch.Tensor) -> Any:
    """Change what a view is of."""
    z = z * 1
    view = z[1:]
    z.mul_(2)
    return view


def of_state() -> list[OutputCase]:
    """Parameters and buffers that are handed out."""

    def tied() -> nn.Module:
        made = Net(lambda s, x: (s.b.weight, s.a(x)))
        made.b.weight = made.a.weight
        return made

    return [
        net("a parameter", lambda s, x: (s.p, s.a(x))),
        net("a view of a parameter", lambda s, x: (s.p[1:], s.a(x))),
        net("a transposed weight that is used, too", lambda s, x: (s.a.weight.t(), s.a(x))),
        net("a parameter and its view", lambda s, x: (s.p, s.p.view(-1), s.a(x))),
        net("a parameter detached", lambda s, x: (s.p.detach(), s.a(x))),
        net("data of a parameter", lambda s, x: (s.p.data, s.a(x) @ s.p)),
        net("a parameter expanded", lambda s, x: (s.a.bias.expand(4, 8), s.a(x))),
        net(
            "a view of a parameter under no_grad",
            lambda s, x: (silently(lambda p: p[1:])(s.p), s.a(x)),
        ),
        net("a parameter and nothing else", lambda s, x: s.p),
        net("a parameter twice", lambda s, x: (s.p, s.p, s.a(x))),
        net("all parameters in a dictionary", lambda s, x: (dict(s.named_parameters()), s.a(x))),
        net("a buffer", lambda s, x: (s.h, s.a(x))),
        net("a view of a buffer", lambda s, x: (s.h[2:], s.a(x) * s.h)),
        net("a buffer and its view", lambda s, x: (s.h, s.h.view(2, 4), s.a(x))),
        net("a buffer detached", lambda s, x: (s.h.detach(), s.a(x))),
        OutputCase("a tied weight", tied),
    ]


ALIASES: tuple[OutputCase, ...] = (*of_inputs(), *of_intermediates(), *of_state())
