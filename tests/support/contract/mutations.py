"""Data and metadata of inputs, buffers, parameters and results, changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from support.contract.aliases import net
from support.contract.inputs import data, inner, leaf
from support.contract.outputs import Net, OutputCase

Change = Callable[[torch.Tensor], Any]


def _silently(change: Change) -> Change:
    def make(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return change(x)

    return make


def _filled(x: torch.Tensor) -> None:
    x[:, 0] = 3.0


def _put(x: torch.Tensor) -> None:
    x[torch.tensor([0, 2])] = 0.5


VALUES: dict[str, Change] = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(2),
    "copy_": lambda x: x.copy_(torch.ones(8)),
    "zero_": lambda x: x.zero_(),
    "a column filled": _filled,
    "rows put by an index": _put,
    "mul_ of a view": lambda x: x.view(-1).mul_(2),
    "mul_ of a view of a view": lambda x: x.t()[1:3].mul_(2),
    "mul_ of a chunk": lambda x: x.chunk(2)[1].mul_(2),
    "mul_ of the detached": lambda x: x.detach().mul_(2),
    "mul_ of its data": lambda x: x.data.mul_(2),
    "mul_ under no_grad": _silently(lambda x: x.mul_(2)),
    "relu_": F.relu_,
    "masked_fill_": lambda x: x.masked_fill_(x > 0.5, 0.0),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "clamp with out=": lambda x: torch.clamp(x.detach(), -1, 1, out=x.detach()),
}
METADATA: dict[str, Change] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.squeeze_(),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "as_strided_": lambda x: x.as_strided_((2, 8), (8, 1)),
    "set_": lambda x: x.set_(torch.ones(2, 8)),
    "resize_": lambda x: x.resize_(2, 8),
    "detach_": lambda x: x.detach_(),
    "requires_grad_": lambda x: x.requires_grad_(),
    "its data replaced": lambda x: setattr(x, "data", torch.ones(4, 8)),
}


def of_inputs() -> list[OutputCase]:
    """Inputs, changed before a layer reads them."""

    def values(change: Change) -> Callable[..., Any]:
        def function(s: Net, x: torch.Tensor) -> Any:
            change(x)
            return s.a(x)

        return function

    def metadata(change: Change) -> Callable[..., Any]:
        def function(s: Net, x: torch.Tensor) -> Any:
            y = s.a(x * 1)
            change(x)
            return y, x.sum()

        return function

    def returned(s: Net, x: torch.Tensor) -> Any:
        x.mul_(2)
        return s.a(x), x

    def view_returned(s: Net, x: torch.Tensor) -> Any:
        x.mul_(2)
        return s.a(x), x[1:]

    def read_before(s: Net, x: torch.Tensor) -> Any:
        y = s.a(x + 0)
        x.copy_(y.detach())
        return y

    def saved_before(s: Net, x: torch.Tensor) -> Any:
        y = s.a(x)
        x.mul_(2)
        return y

    def by_result(s: Net, x: torch.Tensor) -> Any:
        y = s.a(x * 1)
        x.copy_(y)
        return y.sum(), x

    def two_changed(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        y.mul_(x)
        return s.a(x * y)

    def values_and_shape(s: Net, x: torch.Tensor) -> Any:
        x.mul_(2)
        x.t_()
        return s.a(x.t())

    def back_again(s: Net, x: torch.Tensor) -> Any:
        x.t_().t_()
        return s.a(x)

    return [
        *(net(f"input, {name}", values(change)) for name, change in VALUES.items()),
        *(
            net(f"computed input, {name}", values(VALUES[name]), inner)
            for name in ("add_", "mul_ of a view", "mul_ of the detached", "mul_ under no_grad")
        ),
        *(
            net(f"leaf input, {name}", values(VALUES[name]), leaf)
            for name in ("add_", "mul_ of a view", "mul_ of its data", "mul_ under no_grad")
        ),
        *(net(f"input, {name}", metadata(change)) for name, change in METADATA.items()),
        *(
            net(f"computed input, {name}", metadata(METADATA[name]), inner)
            for name in ("t_", "unsqueeze_", "detach_")
        ),
        net("input changed and returned", returned),
        net("computed input changed and returned", returned, inner),
        net("input changed, its view returned", view_returned),
        net("computed input changed, its view returned", view_returned, inner),
        net("input written after it was read", read_before),
        net("input written after a layer saved it", saved_before),
        net("input written with a result that needs a gradient", by_result),
        net("two inputs changed, one by the other", two_changed, data, inner),
        net("input: values and shape", values_and_shape),
        net("input: transposed in place and back", back_again),
    ]


def of_state() -> list[OutputCase]:
    """Buffers and parameters, changed in forward."""

    def buffer(change: Change) -> Callable[..., Any]:
        def function(s: Net, x: torch.Tensor) -> Any:
            change(s.h)
            return s.a(x) * s.h.view(-1)[:1]

        return function

    def counted(s: Net, x: torch.Tensor) -> Any:
        s.h += 1
        return s.a(x)

    def counted_and_returned(s: Net, x: torch.Tensor) -> Any:
        s.h += 1
        return s.a(x), s.h

    def view_returned(s: Net, x: torch.Tensor) -> Any:
        s.h[:4] += 1
        return s.a(x), s.h[2:6]

    def by_result(s: Net, x: torch.Tensor) -> Any:
        y = s.a(x)
        s.h.copy_(y.detach().mean(0))
        return y * s.h

    def with_history(s: Net, x: torch.Tensor) -> Any:
        y = s.a(x)
        s.h.detach_()
        s.h.copy_(y.mean(0))
        return y * s.h

    def weight(s: Net, x: torch.Tensor) -> Any:
        with torch.no_grad():
            s.p.mul_(0.9)
        return s.a(x) @ s.p

    def weight_data(s: Net, x: torch.Tensor) -> Any:
        s.p.data.clamp_(-0.5, 0.5)
        return s.a(x) @ s.p

    def weight_after(s: Net, x: torch.Tensor) -> Any:
        y = s.a(x) @ s.p
        s.p.data.clamp_(-0.5, 0.5)
        return y

    def weight_replaced(s: Net, x: torch.Tensor) -> Any:
        s.p.data = s.p.data * 0.9
        return s.a(x) @ s.p

    def leaf_changed(s: Net, x: torch.Tensor) -> Any:
        s.p.mul_(2)
        return s.a(x) @ s.p

    names = ("add_", "copy_", "zero_", "mul_ of a view", "mul_ of the detached", "bernoulli_")
    return [
        *(net(f"buffer, {name}", buffer(VALUES[name])) for name in names),
        net("buffer, unsqueeze_", buffer(METADATA["unsqueeze_"])),
        net("buffer, resize_", buffer(lambda h: h.resize_(h.numel() + 1).fill_(1.0))),
        net("buffer counts", counted),
        net("buffer counts and is returned", counted_and_returned),
        net("buffer's view changed, another returned", view_returned),
        net("buffer written with a result", by_result),
        net("buffer written with a result that needs a gradient", with_history),
        net("parameter scaled under no_grad", weight),
        net("data of a parameter clamped", weight_data),
        net("data of a parameter clamped after its use", weight_after),
        net("data of a parameter replaced", weight_replaced),
        net("parameter changed in grad mode", leaf_changed),
    ]


def of_results() -> list[OutputCase]:
    """What a forward has computed, changed before it is returned."""

    def of(change: Change) -> Callable[..., Any]:
        def function(s: Net, x: torch.Tensor) -> Any:
            z = s.a(x)
            change(z)
            return s.b(z)

        return function

    def saved(s: Net, x: torch.Tensor) -> Any:
        z = s.a(x)
        y = z.sin()
        z.mul_(2)
        return y

    def accumulated(s: Net, x: torch.Tensor) -> Any:
        out = torch.zeros(4, 8)
        out[:, :4] += s.a(x)[:, 4:]
        out[1:] *= s.b(x)[1:]
        return out

    def shape(change: Change) -> Callable[..., Any]:
        def function(s: Net, x: torch.Tensor) -> Any:
            z = s.a(x)
            change(z)
            return z

        return function

    names = ("add_", "a column filled", "mul_ of a view of a view", "masked_fill_", "relu_")
    more = ("mul_ under no_grad", "mul_ of a chunk", "mul_ of the detached")
    return [
        *(net(f"result, {name}", of(VALUES[name])) for name in (*names, *more)),
        *(net(f"result, {name}", shape(METADATA[name])) for name in ("t_", "unsqueeze_")),
        net("result, detach_", lambda s, x: (s.b(x), s.a(x).detach_())),
        net("result changed after it was saved", saved),
        net("a tensor of zeros filled slice by slice", accumulated),
    ]


MUTATIONS: tuple[OutputCase, ...] = (*of_inputs(), *of_state(), *of_results())
