"""Inputs that share memory with each other, or with what the module holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.contract.inputs import Inputs, data, inner, leaf
from support.contract.outputs import Net, OutputCase


def shared(name: str, inputs: Inputs, function: Callable[..., Any] | None = None) -> OutputCase:
    """Return a case of inputs that share memory."""
    return OutputCase(name, lambda: Net(function or _both), inputs)


def of(base: Callable[[], torch.Tensor], *views: Callable[[torch.Tensor], Any]) -> Inputs:
    """Return what makes views of one base."""

    def make(module: Any) -> tuple[Any, ...]:
        made = base()
        return tuple(view(made) for view in views)

    return make


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _first(x: torch.Tensor) -> torch.Tensor:
    return x[:3]


def _last(x: torch.Tensor) -> torch.Tensor:
    return x[1:]


def _above(x: torch.Tensor) -> torch.Tensor:
    return x[:2]


def _below(x: torch.Tensor) -> torch.Tensor:
    return x[2:]


def _both(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    return s.a(x).sum() * s.b(y).tanh()


def _changed(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.mul_(2)
    return s.a(x).sum() * s.b(y).tanh()


def _changed_late(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    z = s.a(y + 1)
    y.add_(1)
    return z.sum() + s.b(x * 1)


def _changed_both(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.mul_(2)
    y.add_(1)
    return s.a(x).sum() * s.b(y)


def _returned(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x, y, s.a(x).sum()


def _views_returned(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x[0], y.view(-1), s.a(x).sum()


def _changed_and_returned(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    x.mul_(2)
    return y, s.a(x).sum()


def _nested(s: Net, batch: dict[str, Any]) -> Any:
    return s.a(batch["x"]) * s.b(batch["rest"][0]), batch


def _in_dictionary(module: Any) -> tuple[Any, ...]:
    x = leaf()
    return ({"x": x, "rest": [x, x.detach()]},)


def _with(take: Callable[[Net], torch.Tensor]) -> Inputs:
    return lambda module: (data(), take(module))


def _times(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    return s.a(x) @ s.p + y.sum()


def _state_changed(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    s.h += 1
    return s.a(x) * y


def _state_changed_between(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
    z = s.a(x) * y
    s.h += 1
    return z + y


def _late_alias(s: Net) -> torch.Tensor:
    """Return another tensor in the first step, an alias of the buffer in those that follow."""
    return torch.ones(8) if float(s.h[0]) < 2 else s.h.detach()


KINDS = {"data": data, "a leaf": leaf, "computed": inner}

SHARED_INPUTS: tuple[OutputCase, ...] = (
    *(shared(f"one input twice ({k})", of(make, _same, _same)) for k, make in KINDS.items()),
    *(
        shared(f"an input and its detached alias ({k})", of(make, _same, torch.Tensor.detach))
        for k, make in KINDS.items()
    ),
    *(
        shared(f"two views of one base ({k})", of(make, _above, _below))
        for k, make in KINDS.items()
    ),
    *(
        shared(f"two overlapping views of one base ({k})", of(make, _first, _last))
        for k, make in KINDS.items()
    ),
    *(shared(f"a base and its view ({k})", of(make, _same, _last)) for k, make in KINDS.items()),
    shared("one input twice, changed (data)", of(data, _same, _same), _changed),
    shared("one input twice, changed (computed)", of(inner, _same, _same), _changed),
    shared("two views of one base, one changed (data)", of(data, _above, _below), _changed),
    shared("two views of one base, one changed (computed)", of(inner, _above, _below), _changed),
    shared("two overlapping views, one changed (data)", of(data, _first, _last), _changed),
    shared("two overlapping views, one changed (computed)", of(inner, _first, _last), _changed),
    shared("two overlapping views, both changed (data)", of(data, _first, _last), _changed_both),
    shared(
        "two overlapping views, both changed (computed)", of(inner, _first, _last), _changed_both
    ),
    shared("two overlapping views, one changed late", of(data, _first, _last), _changed_late),
    shared("a base and its view, the base changed (data)", of(data, _same, _last), _changed),
    shared("a base and its view, the base changed (computed)", of(inner, _same, _last), _changed),
    shared("a base and its view, the view changed", of(data, _last, _same), _changed),
    shared(
        "an input and its detached alias, one changed",
        of(inner, torch.Tensor.detach, _same),
        _changed,
    ),
    shared("an input and its transpose", of(leaf, _same, lambda x: x.t().reshape(4, 8))),
    shared("rows that are expanded", of(data, lambda x: x[:1].expand(4, 8), _same)),
    shared("one input twice, returned", of(leaf, _same, _same), _returned),
    shared("two overlapping views, returned", of(leaf, _first, _last), _returned),
    shared(
        "two overlapping views, their views returned", of(inner, _first, _last), _views_returned
    ),
    shared(
        "a base changed, its view returned (data)", of(data, _same, _last), _changed_and_returned
    ),
    shared(
        "a base changed, its view returned (computed)",
        of(inner, _same, _last),
        _changed_and_returned,
    ),
    shared("one input in nested containers", _in_dictionary, _nested),
    shared("a parameter as an input", _with(lambda m: m.p), _times),
    shared("a parameter that is used, too, detached", _with(lambda m: m.a.weight.detach()), _times),
    shared("a view of a parameter as an input", _with(lambda m: m.p[1:]), _times),
    shared("a computed view of a weight as an input", _with(lambda m: m.a.weight.t() * 2), _times),
    shared("a buffer as an input", _with(lambda m: m.h), _times),
    shared("a buffer as an input, the buffer changed", _with(lambda m: m.h), _state_changed),
    shared(
        "a view of a buffer as an input, the buffer changed",
        _with(lambda m: m.h[:1]),
        _state_changed,
    ),
    shared("an alias of a buffer as a later input", _with(_late_alias), _state_changed_between),
)
