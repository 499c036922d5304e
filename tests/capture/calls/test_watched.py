"""A signature that is made anew only where something has changed is never an old one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tightfit.capture.calls.signature import module_signature
from tightfit.capture.calls.watched import WatchedModules

KEPT = frozenset({("model.0", "counter")})


def network() -> nn.Sequential:
    """Return a network with a tied weight, hooks, and attributes of every kind."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    first.register_forward_hook(lambda *_: None)
    first.number, first.list, first.nested = 1.5, [1, 2], ({"a": [1]}, {2})
    first.function, first.tensor, first.counter = torch.relu, torch.ones(1), 0
    return nn.Sequential(first, nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.1)), last)


def renamed(model: nn.Sequential) -> None:
    model._modules["4"] = model._modules.pop("3")


def retied(model: nn.Sequential) -> None:
    model[3].weight = copy.deepcopy(model[3].weight)


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "mode": lambda m: m[2][0].eval(),
    "class": lambda m: setattr(m[2][0], "__class__", nn.AlphaDropout),
    "module replaced": lambda m: m[2].__setitem__(0, nn.Identity()),
    "module added": lambda m: m.append(nn.ReLU()),
    "module renamed": renamed,
    "hook": lambda m: m[1].register_forward_pre_hook(lambda *_: None),
    "tied no longer": retied,
    "parameter for a module without": lambda m: setattr(m[2], "w", nn.Parameter(torch.ones(2))),
    "parameter gone": lambda m: m[0].register_parameter("bias", None),
    "frozen": lambda m: m[0].bias.requires_grad_(False),
    "transposed in place": lambda m: setattr(m[0].weight, "data", m[0].weight.data.t()),
    "precision": lambda m: m.double(),
    "buffer of another shape": lambda m: m[1].running_mean.resize_(3),
    "buffer": lambda m: setattr(m[1], "running_var", None),
    "number": lambda m: setattr(m[0], "number", 2.5),
    "item": lambda m: m[0].list.append(3),
    "nested item": lambda m: m[0].nested[0]["a"].append(3),
    "nested set": lambda m: m[0].nested[1].add(3),
    "function": lambda m: setattr(m[0], "function", torch.tanh),
    "equal tensor": lambda m: setattr(m[0], "tensor", torch.ones(1)),
    "new attribute": lambda m: setattr(m[1], "new", 1),
    "attribute gone": lambda m: delattr(m[0], "number"),
}
NOTHING: dict[str, Callable[[nn.Sequential], Any]] = {
    "values": lambda m: m[0].weight.data.zero_(),
    "what every forward changes": lambda m: setattr(m[0], "counter", m[0].counter + 1),
    "gradients": lambda m: m(torch.ones(2, 4)).sum().backward(),
}


@pytest.mark.parametrize("change", [*CHANGES, *NOTHING])
def test_it_is_what_the_modules_are_now(change: str):
    model = network()
    watched = WatchedModules({"model": model})

    def now() -> tuple[Any, Any]:
        made = watched.signature([], model, KEPT)
        return made, module_signature({"model": model}, model, KEPT)

    (before, plain_before), (again, _) = now(), now()
    assert again is before and before.parts == plain_before
    (CHANGES | NOTHING)[change](model)
    after, plain_after = now()
    assert after.parts == plain_after
    assert (after is before) == (change in NOTHING)
    assert (after == before) == (plain_after == plain_before) == (change in NOTHING)
    assert now()[0] is after


def test_arguments_and_modes_count():
    model = network()
    watched = WatchedModules({"model": model})
    plain = watched.signature([torch.ones(1)], model, KEPT)
    assert watched.signature([model[0].weight], model, KEPT) != plain
    with torch.no_grad():
        assert watched.signature([torch.ones(1)], model, KEPT) != plain
    assert watched.signature([torch.ones(1)], model, KEPT) == plain


def test_what_is_replaced_is_not_held():
    model = network()
    watched = WatchedModules({"model": model})
    watched.signature([], model, KEPT)
    held = torch.utils.weak.WeakTensorKeyDictionary()
    held[model[0].tensor], held[model[0].bias] = 1, 2
    model[0].tensor, model[0].bias = torch.ones(2), nn.Parameter(torch.ones(4))
    assert len(held) == 0
