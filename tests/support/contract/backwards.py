"""What the caller does with outputs on the way back: gradients of every kind, parts, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.contract.aliases import net
from support.contract.inputs import data, inner, leaf
from support.contract.outputs import Net, OutputCase, of_first


def result(s: Net, x: torch.Tensor) -> Any:
    """Return one output."""
    return s.b(s.a(x).tanh())


def pair(s: Net, x: torch.Tensor) -> Any:
    """Return two outputs of one hidden tensor."""
    z = s.a(x).tanh()
    return s.b(z), z


def viewed(s: Net, x: torch.Tensor) -> Any:
    """Return a tensor and its view."""
    z = s.b(s.a(x).tanh())
    return z, z.t()


def no_loss(outputs: Any) -> None:
    """Have no loss: the case has gone back itself."""


def gradients() -> list[OutputCase]:
    """Gradients that lie in memory as plain PyTorch's losses make them."""
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def of(name: str, loss: Callable[[Any], torch.Tensor], function: Any = result) -> OutputCase:
        return net(f"gradient: {name}", function, leaf, loss=loss, is_changed=False)

    return [
        of("expanded from one number", lambda o: o.sum()),
        of("transposed", lambda o: (o.t() * weight).sum()),
        of("of one row", lambda o: o[1].square().sum()),
        of("of a diagonal", lambda o: o.diagonal().square().sum()),
        of("of every other element", lambda o: o.flatten()[::2].square().sum()),
        of("zero", lambda o: (o * 0).sum()),
        of("not a number", lambda o: (o / 0).sum()),
        of("by double", lambda o: o.double().square().sum()),
        of("expanded, of a view", lambda o: o[1].sum(), viewed),
        of("of a view and transposed of its base", lambda o: (o[0].t() * o[1]).sum(), viewed),
        of("of the second output only", lambda o: o[1].square().sum(), pair),
        of("of both outputs, one expanded", lambda o: o[0].sum() + o[1].square().sum(), pair),
    ]


def by_parts() -> list[OutputCase]:
    """Several backwards, and gradients of some tensors only."""

    def goes(name: str, use: Callable[..., Any], function: Any = pair, **more: Any) -> OutputCase:
        options = {"use": use, "loss": no_loss, "is_changed": False, **more}
        return net(f"backward: {name}", function, leaf, **options)

    def one_after_the_other(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, second = call(x)
        first.square().sum().backward(retain_graph=True)
        second.square().sum().backward()

    def twice(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, _ = call(x)
        loss = first.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def of_the_input(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, _ = call(x)
        return torch.autograd.grad(first.square().sum(), x)[0]

    def of_a_weight(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, _ = call(x)
        found = torch.autograd.grad(first.sum(), [module.a.weight, module.p], allow_unused=True)
        return found[0]

    def by_an_output(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, second = call(x)
        return torch.autograd.grad(first.square().sum(), second, allow_unused=True)

    def by_itself(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        _, second = call(x)
        return torch.autograd.grad(second.square().sum(), [second, module.a.weight])

    def twice_differentiated(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, _ = call(x)
        (gradient,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        (gradient.square().sum() + first.sum()).backward()

    def with_gradient(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, _ = call(x)
        first.backward(torch.randn(8, 4).t())

    def both_with_gradients(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, second = call(x)
        torch.autograd.backward([first, second], [torch.ones(1, 8).expand(4, 8), second.detach()])

    def hook_of_output(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, second = call(x)
        first.register_hook(lambda g: g * 2)
        second.register_hook(lambda g: g * 3)
        (first.sum() + second.sum()).backward()

    def kept(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, second = call(x)
        first.retain_grad()
        second.retain_grad()
        (first.square().sum() + second.square().sum()).backward()
        return first.grad, second.grad

    def kept_of_views(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, second = call(x)
        second.retain_grad()
        second.square().sum().backward()
        return first.grad, second.grad

    def after_evaluation(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        with torch.no_grad():
            before = call(x)
        first, _ = call(x)
        first.square().sum().backward()
        return before

    def around_evaluation(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, _ = call(x)
        with torch.no_grad():
            between = call(x * 2)
        first.square().sum().backward()
        return between

    def in_another_order(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, _ = call(x)
        _, second = call(x * 2)
        first.square().sum().backward()
        second.square().sum().backward()

    def dropped(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        call(x)
        first, _ = call(x * 2)
        first.square().sum().backward()

    def checkpointed(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, _ = checkpoint(call, x, use_reentrant=False)
        first.square().sum().backward()

    def alternating(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        first, second = call(x)
        # the values of a batch say which: the same one on both sides
        (first if x[0, 0] > 0 else second).square().sum().backward()

    return [
        goes("one output after the other", one_after_the_other),
        goes("twice through one output", twice),
        goes("a gradient by the input", of_the_input),
        goes("a gradient by a weight and by one that is not used", of_a_weight),
        goes("a gradient of one output by another", by_an_output),
        goes("a gradient by an output of a loss of it alone", by_itself),
        goes("a gradient differentiated again", twice_differentiated),
        goes("a given gradient, transposed", with_gradient),
        goes("two given gradients, one expanded", both_with_gradients),
        goes("hooks of outputs", hook_of_output),
        goes("gradients of outputs kept", kept),
        goes("the gradient of a view kept", kept_of_views, viewed),
        goes("after an evaluation", after_evaluation),
        goes("an evaluation between", around_evaluation),
        goes("two forwards, two backwards in their order", in_another_order),
        goes("a forward that is dropped", dropped),
        goes("a checkpoint of the caller's", checkpointed),
        goes("another output in each step", alternating),
    ]


class Dirty(torch.autograd.Function):
    """Changes its input in place and says so."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Partly(torch.autograd.Function):
    """Has an output that needs no gradient."""

    @staticmethod
    def forward(ctx, x):
        order = x.argsort(1)
        ctx.mark_non_differentiable(order)
        return x * 3, order

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * 3


class AsItIs(torch.autograd.Function):
    """Returns its input, and doubles its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Unfilled(torch.autograd.Function):
    """Asks for gradients that may be None."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        found = None if first is None else first * 2
        return found if second is None else (second * 3 if found is None else found + second * 3)


def functions() -> list[OutputCase]:
    """Outputs of an `autograd.Function`."""

    return [
        net("Function: a result changed in place", lambda s, x: Dirty.apply(s.a(x))),
        net(
            "Function: a computed input changed in place",
            lambda s, x: (s.a(Dirty.apply(x)), x),
            inner,
        ),
        net("Function: an output without gradient", lambda s, x: Partly.apply(s.a(x))),
        net("Function: its input as it is", lambda s, x: AsItIs.apply(s.a(x))),
        net("Function: the module's input as it is", lambda s, x: (AsItIs.apply(x), s.a(x)), leaf),
        net(
            "Function: the module's computed input as it is",
            lambda s, x: (s.a(x), AsItIs.apply(x)),
            inner,
        ),
        net("Function: a parameter as it is", lambda s, x: (AsItIs.apply(s.p), s.a(x))),
        net(
            "Function: gradients that are None",
            lambda s, x: Unfilled.apply(s.a(x)),
            data,
            loss=of_first,
        ),
    ]


BACKWARDS: tuple[OutputCase, ...] = (*gradients(), *by_parts(), *functions())
