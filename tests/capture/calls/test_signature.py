"""What a module's attributes are tells one step from another."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tightfit
from tightfit.capture.calls.modules import SeenModules


def signature(value: Any) -> Any:
    module = nn.ReLU()
    module.attribute = value
    return SeenModules({"model": module}).signature(module)


@pytest.mark.parametrize(
    "before, after",
    [
        (0.1, 0.2),
        (torch.float32, torch.bfloat16),
        ([1, 2], [2, 1]),
        ({"a": [1, (2, None)]}, {"a": [1, (2, 0)]}),
        ({1, 2}, {1, 3}),
        (F.relu, F.gelu),
        (nn.ReLU, nn.GELU),
        (functools.partial(F.gelu, approximate="tanh"), functools.partial(F.gelu)),
    ],
)
def test_another_value_is_another_step(before: Any, after: Any) -> None:
    assert signature(before) == signature(before)
    assert hash(signature(before)) == hash(signature(before))
    assert signature(before) != signature(after)


def test_what_takes_the_address_of_something_else_is_not_that() -> None:
    """Functions made anew for every step lie where the last but one has lain."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())

    class Bent(nn.Module):
        def forward(self, x):
            return self.bend(x)

    bent = model[1] = Bent()
    tightfit.fit(model, "1GiB", costs="unit", planner="checkpoint_all")
    for number in range(12):
        bent.bend = None
        bent.bend = functools.partial(F.leaky_relu, negative_slope=number / 10)
        x = torch.randn(3, 4)
        assert torch.equal(model(x), bent.bend(model[0](x)))


class Everything(nn.Module):
    """Of all that a signature looks at something."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        self.rate = 0.5
        self.sizes = [1, {"a": 2}]
        self.function = F.relu
        self.thing = object()


def _replaced(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(torch.zeros(3, 3))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "mode": lambda m: m.train(not m.training),
    "mode of one": lambda m: m.second[0].eval(),
    "number": lambda m: setattr(m, "rate", m.rate + 1),
    "number becomes a tensor": lambda m: setattr(m, "rate", torch.tensor(float(m.rate))),
    "object becomes a number": lambda m: setattr(m, "thing", 3),
    "contents": lambda m: m.sizes[1].update(a=m.sizes[1]["a"] + 1),
    "contents beyond plain values": lambda m: m.sizes.append(object()),
    "function": lambda m: setattr(m, "function", F.gelu),
    "new attribute": lambda m: setattr(m, f"more{len(m.__dict__)}", 1),
    "attribute for another": lambda m: (m.__dict__.pop("thing", 0), setattr(m, "other", 1)),
    "frozen": lambda m: m.first.weight.requires_grad_(not m.first.weight.requires_grad),
    "parameter replaced": _replaced,
    "shape": lambda m: setattr(m.first.weight, "data", torch.zeros(3, 3 + m.first.weight.shape[1])),
    "strides": lambda m: setattr(m.first.weight, "data", m.first.weight.data.t().contiguous().t()),
    "dtype": lambda m: m.double(),
    "tied": lambda m: setattr(m.second[1], "weight", m.first.weight),
    "bias gone": lambda m: m.first.register_parameter("bias", None),
    "module replaced": lambda m: setattr(m, "first", nn.Linear(3, 3)),
    "module within": lambda m: m.second.append(nn.ReLU()),
    "module elsewhere": lambda m: setattr(m, "first", m.second[1]),
    "class": lambda m: setattr(m.second[1], "__class__", nn.Identity),
    "hook": lambda m: m.second.register_forward_hook(lambda *_: None),
    "buffer": lambda m: m.register_buffer("table", torch.zeros(len(m.__dict__))),
}


@settings(max_examples=100)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=4), st.sampled_from([None, "input"]))
def test_what_is_asked_again_is_told_as_if_asked_for_the_first_time(changes, given_) -> None:
    model = Everything()
    modules = {"model": model}
    seen = SeenModules(modules)
    for change in ("nothing", *changes):
        CHANGES[change](model)
        leaves = [torch.ones(3)] if given_ is None else [model.second[0].weight]
        anew = SeenModules(modules).signature(None, leaves=leaves)
        assert seen.signature(None, leaves=leaves) == anew
        for name, tensor in {
            **dict(model.named_parameters()),
            **dict(model.named_buffers()),
        }.items():
            assert seen.tensor(f"model.{name}") is tensor


@pytest.mark.parametrize("change", sorted({*CHANGES} - {"nothing"}))
def test_every_change_is_seen(change: str) -> None:
    model = Everything()
    seen = SeenModules({"model": model})
    before = seen.signature(None)
    CHANGES[change](model)
    assert seen.signature(None) != before or change in ("parameter replaced", "module replaced")


def test_nothing_that_was_looked_at_is_kept_alive() -> None:
    model = Everything()
    seen = SeenModules({"model": model})
    seen.signature(None)
    seen.tensor("model.first.weight")
    weight, module = weakref.ref(model.first.weight), weakref.ref(model.first)
    model.first = nn.Linear(3, 3)
    assert weight() is module() is None
