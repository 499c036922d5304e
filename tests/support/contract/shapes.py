"""The nine shapes of issue 34, each with its family."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from support.contract.outputs import Net, OutputCase, of_first


def net(name: str, function: Callable[..., Any], **options: Any) -> OutputCase:
    """Return a case of a function of `Net` and a batch."""
    return OutputCase(name, lambda: Net(function), **options)


def product(outputs: Any) -> torch.Tensor:
    """Return a loss in which the second output is a constant for autograd."""
    first, second = outputs.values() if isinstance(outputs, dict) else outputs
    return (first * second).sum()


def without_grad(function: Callable[[torch.Tensor], torch.Tensor], z: torch.Tensor) -> torch.Tensor:
    """Return what a function makes of a tensor under no_grad."""
    with torch.no_grad():
        return function(z)


STOPPED = {
    "detach": lambda z: z.detach(),
    "data": lambda z: z.data,
    "detach of a view": lambda z: z.view(-1).detach().view(4, 8),
    "a view of detach": lambda z: z.detach().view(4, 8),
    "detach twice": lambda z: z.detach().detach(),
    "a view made under no_grad": lambda z: without_grad(lambda y: y.view(4, 8), z),
    "view_as under no_grad": lambda z: without_grad(lambda y: y.view_as(y), z),
    "a slice made under no_grad": lambda z: without_grad(lambda y: y[:], z),
    "detach of a transpose": lambda z: z.t().detach().t(),
    "detach and clone": lambda z: z.detach().clone(),
}


def pairs() -> list[OutputCase]:
    """f1: a stop-gradient, and what it was made of."""

    def beside(stop: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        def function(s: Net, x: torch.Tensor) -> Any:
            z = s.a(x)
            return z, stop(z)

        return function

    def before(stop: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        def function(s: Net, x: torch.Tensor) -> Any:
            z = s.a(x)
            return stop(z), z

        return function

    def named(stop: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        def function(s: Net, x: torch.Tensor) -> Any:
            z = s.a(x)
            return {"p": z, "t": stop(z)}

        return function

    return [
        *(net(f"f1: {n} beside its tensor", beside(s), loss=product) for n, s in STOPPED.items()),
        *(
            net(f"f1: {name} in a dictionary", named(STOPPED[name]), loss=product)
            for name in ("detach", "data", "a view made under no_grad")
        ),
        *(
            net(f"f1: {name} before its tensor", before(STOPPED[name]))
            for name in ("detach", "a view made under no_grad")
        ),
    ]


def left_behind() -> list[OutputCase]:
    """f2: a stop-gradient left in the module."""

    def use(
        read: Callable[[nn.Module], torch.Tensor], call: Any, module: nn.Module, x: torch.Tensor
    ) -> Any:
        return call(x), read(module)

    def case(name: str, leave: Callable[[Net, torch.Tensor], None], read: Any) -> OutputCase:
        def function(s: Net, x: torch.Tensor) -> torch.Tensor:
            z = s.a(x)
            leave(s, z)
            return z

        def model() -> nn.Module:
            made = Net(function)
            made.ts, made.td = [None], {}
            return made

        return OutputCase(f"f2: {name}", model, use=functools.partial(use, read), loss=product)

    def attribute(s: Net, value: torch.Tensor) -> None:
        s.t = value

    def item(s: Net, value: torch.Tensor) -> None:
        s.ts[0] = value

    def entry(s: Net, value: torch.Tensor) -> None:
        s.td["t"] = value

    def buffer(s: Net, value: torch.Tensor) -> None:
        s.h = value

    return [
        case("detach in an attribute", lambda s, z: attribute(s, z.detach()), lambda m: m.t),
        case("data in an attribute", lambda s, z: attribute(s, z.data), lambda m: m.t),
        case(
            "a view under no_grad in an attribute",
            lambda s, z: attribute(s, without_grad(lambda y: y.view(4, 8), z)),
            lambda m: m.t,
        ),
        case("detach in a list", lambda s, z: item(s, z.detach()), lambda m: m.ts[0]),
        case("detach in a dictionary", lambda s, z: entry(s, z.detach()), lambda m: m.td["t"]),
        case("detach in a buffer", lambda s, z: buffer(s, z.detach()), lambda m: m.h),
        case("the tensor itself in an attribute", attribute, lambda m: m.t),
        case("a view in an attribute", lambda s, z: attribute(s, z.view(-1, 8)), lambda m: m.t),
    ]


def detached_and_views() -> list[OutputCase]:
    """f3, f4 and f5: views and detached tensors of one intermediate, with and without it."""

    def f4(s: Net, x: torch.Tensor) -> Any:
        loss = s.a(x).square().mean()
        return {"loss": loss.unsqueeze(0), "m": loss.detach()}

    def f4_number(s: Net, x: torch.Tensor) -> Any:
        loss = s.a(x).square().mean()
        return {"loss": loss, "m": loss.detach(), "logs": {"loss": loss.data}}

    def of(make: Callable[[torch.Tensor], Any]) -> Callable[[Net, torch.Tensor], Any]:
        return lambda s, x: make(s.a(x))

    return [
        net("f3: a transpose and detach", of(lambda z: (z.T, z.detach())), loss=of_first),
        net("f3: a transpose and data", of(lambda z: (z.T, z.data))),
        net("f3: a flat view and detach", of(lambda z: (z.view(-1), z.detach()))),
        net("f3: a row and detach of another", of(lambda z: (z[0], z[1].detach()))),
        net(
            "f3: a transpose and a view under no_grad",
            of(lambda z: (z.T, without_grad(lambda y: y.view(-1), z))),
        ),
        net("f4: a loss unsqueezed and detached", f4, loss=lambda o: o["loss"].sum()),
        net("f4: a loss and its detached logs", f4_number, loss=lambda o: o["loss"]),
        net("f5: a slice, detach and a square", of(lambda z: (z[:2], z.detach(), z.square()))),
        net("f5: a slice, data and a square", of(lambda z: (z[:2], z.data, z.square()))),
        net("f5: overlapping slices", of(lambda z: (z[:3], z[1:]))),
        net("f5: overlapping slices of a result", of(lambda z: (z.tanh()[:3], z.tanh()[1:]))),
        net("f5: overlapping slices, both of them read", of(lambda z: (z[:3] * 1, z[1:], z[:3]))),
        net("f5: overlapping windows", of(lambda z: (z.unfold(1, 4, 2), z.sum()))),
        net("f5: a tensor, its slice and its square", of(lambda z: (z, z[:2], z.square()))),
        net("f5: columns that overlap rows", of(lambda z: (z[:, :4], z[1:3]))),
        net(
            "f5: three overlapping views and detach", of(lambda z: (z[:3], z[1:], z.T, z.detach()))
        ),
    ]


def replaced_buffers() -> list[OutputCase]:
    """f6: a buffer that is read, then replaced."""

    def average(s: Net, x: torch.Tensor) -> torch.Tensor:
        z = s.a(x)
        y = z * s.h
        s.h = 0.9 * s.h + 0.1 * z.detach().abs().mean(0)
        return y.sum()

    def copied(s: Net, x: torch.Tensor) -> torch.Tensor:
        z = s.a(x)
        y = z * s.h
        s.h.copy_(0.9 * s.h + 0.1 * z.detach().abs().mean(0))
        return y.sum()

    def scaled(s: Net, x: torch.Tensor) -> torch.Tensor:
        y = s.a(x) * s.h.clone()
        s.h.mul_(0.9).add_(y.detach().abs().mean(0), alpha=0.1)
        return y.sum()

    def read_again(s: Net, x: torch.Tensor) -> torch.Tensor:
        z = s.a(x) * s.h
        s.h = s.h + z.detach().mean(0)
        return (z * s.h).sum()

    def under_no_grad(s: Net, x: torch.Tensor) -> torch.Tensor:
        z = s.a(x)
        y = z * s.h
        with torch.no_grad():
            s.h = s.h * 0.9 + z.abs().mean(0) * 0.1
        return y

    def swapped(s: Net, x: torch.Tensor) -> torch.Tensor:
        y = s.a(x) * s.h + s.g
        s.h, s.g = s.g, s.h
        return y

    def two() -> nn.Module:
        made = Net(swapped)
        made.register_buffer("g", torch.zeros(8))
        return made

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(average_of), Net(average_of)

        def forward(self, x):
            return self.second(self.first(x))

    def average_of(s: Net, x: torch.Tensor) -> torch.Tensor:
        z = s.a(x)
        y = z * s.h
        s.h = 0.9 * s.h + 0.1 * z.detach().abs().mean(0)
        return y

    return [
        net("f6: a buffer read, then replaced by its average", average),
        net("f6: a buffer read, then written in place", copied),
        net("f6: a copy of a buffer read, then the buffer written in place", scaled),
        net("f6: a buffer read, replaced, read again", read_again),
        net("f6: a buffer read, then replaced under no_grad", under_no_grad),
        OutputCase("f6: two buffers that change places", two),
        OutputCase("f6: buffers of inner modules read, then replaced", Outer),
    ]


def changed_views() -> list[OutputCase]:
    """f7: views that the caller changes in place."""

    def case(
        name: str, make: Callable[[torch.Tensor], Any], change: Callable[[Any], Any]
    ) -> OutputCase:
        options = {"change": change, "is_changed": False}
        return net(f"f7: {name}", lambda s, x: make(s.a(x)), **options)

    def fill(o: torch.Tensor) -> None:
        o[:, 0] = float("-inf")

    def fill_silently(o: torch.Tensor) -> None:
        with torch.no_grad():
            o[:, 0] = 3.0

    return [
        case("a column filled by the caller", lambda z: z.view(2, 2, 8), fill),
        case("a column filled under no_grad", lambda z: z.view(2, 2, 8), fill_silently),
        case(
            "masked by the caller",
            lambda z: z.unflatten(0, (2, 2)),
            lambda o: o.masked_fill_(o > 0.5, 0.0),
        ),
        case("a transpose scaled by the caller", lambda z: z.T, lambda o: o.mul_(3)),
        case(
            "detach of a view zeroed",
            lambda z: (z.view(2, 2, 8), z * 1),
            lambda o: o[0].detach().zero_(),
        ),
        case("a view squeezed by the caller", lambda z: z.unsqueeze(0), lambda o: o.squeeze_(0)),
        case("data of a view scaled", lambda z: z.view(2, 2, 8), lambda o: o.data.mul_(2)),
        case(
            "a tensor and its view, the view scaled",
            lambda z: (z, z.view(-1)),
            lambda o: o[1].mul_(2),
        ),
        case(
            "a tensor and its view, the tensor scaled",
            lambda z: (z, z.view(-1)),
            lambda o: o[0].mul_(2),
        ),
        case("one of two views scaled", lambda z: (z[:2], z[2:]), lambda o: o[0].mul_(2)),
        case(
            "one of two overlapping views scaled", lambda z: (z[:3], z[1:]), lambda o: o[0].mul_(2)
        ),
        case("one of two chunks scaled", lambda z: z.chunk(2), lambda o: o[0].mul_(2)),
        case("a plain output scaled", lambda z: z, lambda o: o.mul_(2)),
        case("an activation's output scaled", lambda z: z.exp(), lambda o: o.mul_(2)),
    ]


def derivatives() -> list[OutputCase]:
    """f8: derivatives taken inside the forward."""
    func = torch.func

    def functional(s: Net, x: torch.Tensor) -> torch.Tensor:
        weights = dict(s.a.named_parameters())
        found = func.grad(lambda w: func.functional_call(s.a, w, (x,)).square().sum())(weights)
        return s.b(x).sum() + sum(g.square().sum() for g in found.values())

    def penalty(s: Net, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = s.b(s.a(x).tanh()).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().sum()

    def inner_step(s: Net, x: torch.Tensor) -> torch.Tensor:
        loss = s.a(x).square().mean()
        (g,) = torch.autograd.grad(loss, s.a.weight, create_graph=True)
        return F.linear(x, s.a.weight - 0.1 * g, s.a.bias).square().mean()

    def tanh(s: Net) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda y: s.a(y).tanh()

    def energy(s: Net) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda y: s.b(s.a(y).tanh()).tanh().sum()

    def value_and_vjp(s: Net, u: torch.Tensor) -> torch.Tensor:
        value, pull = func.vjp(s.a, u[0])
        return value.sum() + pull(value)[0].sum()

    def of_energy(derivative: Callable[..., Any]) -> Callable[[Net, torch.Tensor], torch.Tensor]:
        return lambda s, u: derivative(energy(s))(u[0]).square().sum()

    def grad_of_grad(s: Net, u: torch.Tensor) -> torch.Tensor:
        force = func.grad(energy(s))
        return func.grad(lambda y: force(y).square().sum())(u[0]).sum()

    def jacobian(s: Net, u: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.functional.jacobian(tanh(s), u[0], create_graph=True)
        return found.square().sum()

    def hessian(s: Net, u: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.functional.hessian(energy(s), u[0], create_graph=True)
        return found.square().sum()

    return [
        net("f8: jacrev", lambda s, u: func.jacrev(s.a)(u[0]).sum()),
        net("f8: jacrev of two layers", of_energy(func.jacrev)),
        net("f8: jacfwd", of_energy(func.jacfwd)),
        net("f8: vjp", lambda s, u: func.vjp(tanh(s), u[0])[1](torch.ones(8))[0].sum()),
        net("f8: vjp and its value", value_and_vjp),
        net("f8: hessian", of_energy(func.hessian)),
        net("f8: grad of grad", grad_of_grad),
        net(
            "f8: gradients of each sample",
            lambda s, u: func.vmap(func.grad(energy(s)))(u).square().sum(),
        ),
        net("f8: jvp", lambda s, u: func.jvp(tanh(s), (u[0],), (u[1],))[1].sum()),
        net("f8: grad of weights by functional_call", functional),
        net("f8: forces by autograd.grad", penalty),
        net("f8: a step of weights inside (MAML)", inner_step),
        net("f8: autograd.functional.jacobian", jacobian),
        net("f8: autograd.functional.hessian", hessian),
        net(
            "f8: jacrev under vmap", lambda s, u: func.vmap(func.jacrev(tanh(s)))(u).square().sum()
        ),
    ]


class Cell(nn.Module):
    """A recurrent cell whose state is a buffer that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)
        self.register_buffer("h", torch.zeros(4, 8))

    def forward(self, x):
        self.h = torch.tanh(self.w(x) + self.h)
        return self.h


class AttributeCell(Cell):
    """The same with an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.h
        self.h = torch.zeros(4, 8)


class ListCell(Cell):
    """The same with a list of all states."""

    def __init__(self) -> None:
        super().__init__()
        self.states = [torch.zeros(4, 8)]

    def forward(self, x):
        self.states.append(torch.tanh(self.w(x) + self.states[-1]))
        return self.states[-1]


class TwoOutputsCell(Cell):
    """The same; it returns another thing than the state."""

    def forward(self, x):
        self.h = torch.tanh(self.w(x) + self.h)
        return self.w(self.h)


class InPlaceCell(Cell):
    """The same; the state is written in place."""

    def forward(self, x):
        z = torch.tanh(self.w(x) + self.h)
        self.h.copy_(z)
        return z


def histories() -> list[OutputCase]:
    """f9: a buffer whose history goes from call to call."""

    def begin(module: nn.Module) -> None:
        if isinstance(module, ListCell):
            module.states = [torch.zeros(4, 8)]
        else:
            module.h = torch.zeros(4, 8)

    def three_calls(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        begin(module)
        return sum(call(torch.randn(4, 8)).sum() for _ in range(3))

    def truncated(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        begin(module)
        total = torch.zeros(())
        for _ in range(3):
            total = total + call(torch.randn(4, 8)).sum()
            module.h = module.h.detach()
        return total

    def truncated_after_two(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        begin(module)
        total = torch.zeros(())
        for index in range(4):
            total = total + call(torch.randn(4, 8)).sum()
            if index % 2:
                module.h = module.h.detach()
        return total

    def backward_in_between(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        begin(module)
        for _ in range(2):
            call(torch.randn(4, 8)).sum().backward()
            module.h = module.h.detach()
        return call(x)

    def carried(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        module.h = module.h.detach()
        return call(x)

    def read_after(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        begin(module)
        output = call(x)
        return (output * 2, module.h)

    def read_alone(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        begin(module)
        call(x)
        call(x * 2)
        return module.h.square()

    def detached_in_place(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        begin(module)
        total = call(x).sum().detach()
        module.h.detach_()
        return total + call(x).sum()

    return [
        OutputCase("f9: three calls whose history is in a buffer", Cell, use=three_calls),
        OutputCase("f9: two outputs, history in a buffer", TwoOutputsCell, use=three_calls),
        OutputCase("f9: history in an attribute", AttributeCell, use=three_calls),
        OutputCase("f9: history in a list that grows", ListCell, use=three_calls, is_changed=False),
        OutputCase("f9: the state written in place", InPlaceCell, use=carried),
        OutputCase("f9: truncated after each call", Cell, use=truncated),
        OutputCase("f9: truncated after two calls", Cell, use=truncated_after_two),
        OutputCase("f9: truncated, two outputs", TwoOutputsCell, use=truncated),
        OutputCase("f9: a backward after each call", Cell, use=backward_in_between),
        OutputCase("f9: the state carried, detached first", Cell, use=carried),
        OutputCase("f9: truncated in place", Cell, use=detached_in_place),
        OutputCase("f9: a loss that reads the buffer after the call", Cell, use=read_after),
        OutputCase("f9: a loss of the buffer alone, after two calls", Cell, use=read_alone),
        OutputCase(
            "f9: a loss that reads an attribute after the call", AttributeCell, use=read_after
        ),
        OutputCase("f9: a loss of the buffer, another output", TwoOutputsCell, use=read_alone),
    ]


class Block(nn.Module):
    """A layer with statistics and a mask: what a second forward changes again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)).tanh())


class Checkpointed(nn.Module):
    """Two blocks, run as a function says."""

    def __init__(self, run: Callable[[Checkpointed, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.run = Block(), Block(), run

    def forward(self, x):
        return self.run(self, x)


def checkpoints() -> list[OutputCase]:
    """`torch.utils.checkpoint` around BatchNorm and dropout, in all its forms."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.addmm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def plainly(s: Checkpointed, x: torch.Tensor, **options: Any) -> torch.Tensor:
        y = checkpoint(s.first, x, use_reentrant=False, **options)
        return checkpoint(s.second, y, use_reentrant=False, **options)

    def reentrant(s: Checkpointed, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return checkpoint(s.second, s.first.linear(x), use_reentrant=True, **options)

    def nested(s: Checkpointed, x: torch.Tensor, *, outer: bool, inner: bool) -> torch.Tensor:
        def both(y: torch.Tensor) -> torch.Tensor:
            return s.second(checkpoint(s.first, y, use_reentrant=inner))

        return checkpoint(both, s.first.linear(x), use_reentrant=outer)

    def in_sequence(s: Checkpointed, x: torch.Tensor, *, is_reentrant: bool) -> torch.Tensor:
        functions = [s.first, s.second, s.first.linear]
        return checkpoint_sequential(functions, 2, s.first.linear(x), use_reentrant=is_reentrant)

    def selective(s: Checkpointed, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return plainly(s, x, context_fn=contexts)

    def two_inputs(s: Checkpointed, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            lambda y, scale: s.second(y) * scale, s.first(x), 2.0, use_reentrant=False
        )

    forms: dict[str, Callable[[Checkpointed, torch.Tensor], torch.Tensor]] = {
        "without reentrance": plainly,
        "without reentrance, random state not kept": functools.partial(
            plainly, preserve_rng_state=False
        ),
        "without reentrance, no early stop": functools.partial(plainly, early_stop=False),
        "reentrant": reentrant,
        "reentrant, random state not kept": functools.partial(reentrant, preserve_rng_state=False),
        "nested": functools.partial(nested, outer=False, inner=False),
        "nested reentrant": functools.partial(nested, outer=True, inner=True),
        "reentrant in one that is not": functools.partial(nested, outer=False, inner=True),
        "not reentrant in one that is": functools.partial(nested, outer=True, inner=False),
        "in sequence": functools.partial(in_sequence, is_reentrant=False),
        "in sequence, reentrant": functools.partial(in_sequence, is_reentrant=True),
        "selective": selective,
        "with a number beside the tensor": two_inputs,
    }

    def one(name: str, run: Any) -> OutputCase:
        options = {"excuse": "checkpoint", "is_changed": False}
        return OutputCase(f"checkpoint: {name}", lambda: Checkpointed(run), **options)

    return [one(name, run) for name, run in forms.items()]


def hooks_that_look() -> list[OutputCase]:
    """Hooks that change nothing and write down what they see."""

    def case(name: str, hook: Callable[[Net], None], function: Any = None) -> OutputCase:
        def model() -> nn.Module:
            made = Net(function or (lambda s, x: s.b(s.a(x).tanh())))
            made.seen = []
            hook(made)
            return made

        return OutputCase(f"looking: {name}", model, is_changed=False)

    def forward_of(inner: Callable[[Net], nn.Module]) -> Callable[[Net], None]:
        def add(net: Net) -> None:
            inner(net).register_forward_hook(lambda m, i, o: net.seen.append(tuple(o.shape)))

        return add

    def values_of(inner: Callable[[Net], nn.Module]) -> Callable[[Net], None]:
        def add(net: Net) -> None:
            inner(net).register_forward_hook(lambda m, i, o: net.seen.append(o.detach().clone()))

        return add

    def before(net: Net) -> None:
        net.b.register_forward_pre_hook(lambda m, i: net.seen.append(len(i)))

    def backward(net: Net) -> None:
        net.b.register_full_backward_hook(lambda m, i, o: net.seen.append(o[0].clone()))

    def before_backward(net: Net) -> None:
        net.a.register_full_backward_pre_hook(lambda m, o: net.seen.append(o[0].clone()))

    def norm(net: Net) -> None:
        net.a.register_forward_hook(lambda m, i, o: net.seen.append(float(o.detach().norm())))

    def of_parameter(net: Net) -> None:
        net.a.weight.register_hook(lambda g: net.seen.append(g.clone()))

    def accumulated(net: Net) -> None:
        net.a.weight.register_post_accumulate_grad_hook(lambda p: net.seen.append(p.grad.clone()))

    def hidden(s: Net, x: torch.Tensor) -> torch.Tensor:
        z = s.a(x)
        z.register_hook(lambda g: s.seen.append(g.clone()))
        return s.b(z.tanh())

    def hidden_root(s: Net, x: torch.Tensor) -> torch.Tensor:
        z = s.a(x)
        z.retain_grad()
        s.kept = z
        return s.b(z.tanh())

    def counted(s: Net, x: torch.Tensor) -> torch.Tensor:
        s.count = getattr(s, "count", 0) + len(x)
        z = s.a(x)
        s.seen.append(float(z.mean()))
        return s.b(z)

    return [
        case("shapes in a forward hook of an inner module", forward_of(lambda net: net.a)),
        case("shapes in a forward hook of the outermost module", forward_of(lambda net: net)),
        case("values in a forward hook of an inner module", values_of(lambda net: net.a)),
        case("values in a forward hook of the outermost module", values_of(lambda net: net)),
        case("a forward pre-hook", before),
        case("a full backward hook", backward),
        case("a full backward pre-hook", before_backward),
        case("a number read in a forward hook", norm),
        case("a hook of a parameter's gradient", of_parameter),
        case("a hook after a parameter's gradient", accumulated),
        case("a hook of a hidden tensor", lambda net: None, hidden),
        case("a hidden tensor that retains its gradient, kept", lambda net: None, hidden_root),
        case("counts and logs of the forward itself", lambda net: None, counted),
    ]


def elsewhere() -> list[OutputCase]:
    """Meta models, compiled models, and two forwards."""

    def body(s: Net, x: torch.Tensor) -> torch.Tensor:
        return s.b(s.a(x).tanh()) * s.h

    def mlp() -> nn.Module:
        # sizes of its own, so that nothing measured for another case is at hand
        return nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3))

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return mlp()

    def materialised(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        if module[0].weight.is_meta:
            with torch.no_grad():
                module.to_empty(device="cpu")
                for each in (*module.parameters(), *module.buffers()):
                    each.copy_(torch.randn(each.shape))
        return call(x)

    def assigned(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        if module[0].weight.is_meta:
            module.load_state_dict(mlp().state_dict(), assign=True)
        return call(x)

    def inner_compiled() -> nn.Module:
        made = Net(body)
        made.a = torch.compile(made.a, backend="aot_eager")
        return made

    def in_place_compiled() -> nn.Module:
        made = Net(body)
        made.a.compile(backend="aot_eager")
        return made

    def twice(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        return call(x) * call(x * 2)

    def nested(call: Any, module: nn.Module, x: torch.Tensor) -> Any:
        return call(call(x))

    def meta_batch(module: nn.Module) -> tuple[torch.Tensor]:
        return (torch.empty(6, 5, device="meta"),)

    def batch(module: nn.Module) -> tuple[torch.Tensor]:
        return (torch.randn(6, 5),)

    def before_door(**options: Any) -> Callable[..., Any]:
        return lambda door, module, budget: door(torch.compile(module, **options), budget)

    def after_door(door: Any, module: nn.Module, budget: str) -> Any:
        return torch.compile(door(module, budget), backend="aot_eager")

    eager = {"backend": "aot_eager"}
    named = "compiled: the compiled model goes through the door"
    return [
        OutputCase("meta: a step on the meta device", on_meta, meta_batch, is_changed=False),
        OutputCase("meta: a batch on the CPU", on_meta, batch, is_changed=False),
        OutputCase("meta: emptied after `fit`", on_meta, batch, use=materialised),
        OutputCase("meta: weights assigned after `fit`", on_meta, batch, use=assigned),
        net(named, body, through=before_door(**eager)),
        net(f"{named} (Inductor)", body, through=before_door()),
        net("compiled: what comes out of the door is compiled", body, through=after_door),
        net("compiled: in place, then through the door", body, through=compiled_in_place),
        OutputCase("compiled: an inner module is compiled", inner_compiled),
        OutputCase("compiled: an inner module is compiled in place", in_place_compiled),
        net("two forwards whose product is the loss", body, use=twice),
        net("a forward of a forward", body, use=nested),
    ]


def compiled_in_place(door: Any, module: nn.Module, budget: str) -> Any:
    """Compile a module by its own method, then put it through a door."""
    module.compile(backend="aot_eager")
    return door(module, budget)


SHAPES: tuple[OutputCase, ...] = (
    *pairs(),
    *left_behind(),
    *detached_and_views(),
    *replaced_buffers(),
    *changed_views(),
    *derivatives(),
    *histories(),
    *checkpoints(),
    *hooks_that_look(),
    *elsewhere(),
)
