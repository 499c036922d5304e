"""Inputs and outputs keep their types and whatever in them is no tensor."""

from __future__ import annotations

import collections
import copy
import enum
import typing
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import tightfit
from support.models import Detection, Outputs, Scored
from tightfit.capture.calls.structure import Arguments, flatten


class Mode(enum.Enum):
    FAST = 1


@dataclass
class Batch:
    x: torch.Tensor
    mode: Mode = Mode.FAST
    made: list[typing.Any] = field(default_factory=list, init=False)


class Returns(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.make = make

    def forward(self, batch):
        return self.make(self.a(batch.x))


def fitted(make) -> nn.Module:
    return tightfit.fit(Returns(make), "1GiB", costs="unit")


def test_types_and_plain_values_are_those_of_eager() -> None:
    model = Outputs()
    plain = copy.deepcopy(model)
    given = Detection(torch.randn(3, 6), torch.randn(3))
    out, expected = tightfit.fit(model, "1GiB", costs="unit")(given), plain(given)
    assert type(out) is Scored
    assert out.threshold == 0.5
    inner, *rest = out.detections["all"]
    assert type(inner) is Detection
    assert rest == list(expected.detections["all"][1:])
    assert type(rest[1]) is torch.Size
    assert inner.classes == 3
    assert inner.boxes[1] is None
    assert torch.equal(inner.boxes[0], expected.detections["all"][0].boxes[0])
    assert inner.scores.dtype == torch.float64


@pytest.mark.parametrize(
    "make",
    [
        lambda h: collections.OrderedDict(a=h, b=None),
        lambda h: collections.defaultdict(list, a=[h]),
        lambda h: h.max(1),
        Batch,
        lambda h: [(h, Mode.FAST), {"deep": (h.t(), torch.bfloat16, h.device)}],
    ],
)
def test_containers_come_back_as_they_are(make) -> None:
    batch = Batch(torch.randn(3, 4))
    assert type(fitted(make)(batch)) is type(make(torch.randn(3, 4)))


class Layer:
    kind = "keys"

    def __init__(self, keys: torch.Tensor | None = None) -> None:
        self.keys = keys
        self.inner: typing.Any = None


class Cache:
    """Keys of several layers, as caches of language models hold them."""

    def __init__(self, *keys: torch.Tensor) -> None:
        self.layers = [Layer(k) for k in keys]
        self.new_layer = Layer


def test_objects_that_are_nothing_but_attributes_come_back() -> None:
    model = Returns(lambda h: Cache(h, h.exp()))
    x = torch.randn(3, 4)
    expected = copy.deepcopy(model)(Batch(x))
    model = tightfit.fit(model, "1GiB", costs="unit")
    for _ in range(2):
        cache = model(Batch(x))
        assert type(cache) is Cache
        assert cache.new_layer is Layer
        for layer, other in zip(cache.layers, expected.layers, strict=True):
            assert type(layer) is Layer
            assert layer.inner is None
            assert torch.equal(layer.keys, other.keys)
        sum(layer.keys.sum() for layer in cache.layers).backward()


class Reads(nn.Module):
    """Attends to what a cache holds, and puts its own there if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, cache, write=False):
        keys = self.a(x)
        if write:
            cache.layers.append(Layer(keys))
        return sum(layer.keys.sum() for layer in cache.layers) * keys


def test_objects_are_inputs_and_are_changed_as_the_forward_does() -> None:
    model = tightfit.fit(Reads(), "1GiB", costs="unit")
    plain = tightfit.unfit(copy.deepcopy(model))
    x, keys = torch.randn(3, 4), torch.randn(3, 4)
    cache, own = Cache(keys), Cache(keys)
    for write in (False, True, True):
        expected, found = plain(x, cache, write=write), model(x, own, write=write)
        assert torch.equal(found, expected)
        assert len(own.layers) == len(cache.layers)
        assert all(
            torch.equal(a.keys, b.keys) for a, b in zip(own.layers, cache.layers, strict=True)
        )


def holds_generator(h: torch.Tensor) -> Layer:
    layer = Layer(h)
    layer.inner = iter([h])
    return layer


@pytest.mark.parametrize("make", [holds_generator, lambda h: {1, 2}, lambda h: (h, iter([h]))])
def test_objects_that_may_hold_tensors_come_back(make) -> None:
    batch = Batch(torch.randn(3, 4))
    assert type(fitted(make)(batch)) is type(make(torch.randn(3, 4)))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((torch.ones(2), 3, None), {"scale": 0.5, "mask": nn.Parameter(torch.ones(1))}),
        ((True, "text"), {"b": 1, "a": 2}),
        ((torch.Size([2]), [1]), {"a": {"b": 1}}),
    ],
)
def test_arguments_nest_as_they_do_in_a_tree(args: typing.Any, kwargs: typing.Any) -> None:
    leaves, spec = flatten((args, kwargs))
    given = Arguments.of(args, kwargs)
    assert given.spec == spec and hash(given.spec) == hash(spec)
    assert len(given.leaves) == len(leaves)
    assert all(a is b for a, b in zip(given.leaves, leaves, strict=True))
