"""A trace leaves none of its tensors behind, whatever the model's code keeps, failed or not."""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

TABLE: dict[int, Any] = {}
PAIRS: dict[int, Any] = {}
NAMED: dict[str, Any] = {}
SEEN: list[Any] = []
LATEST: collections.deque[Any] = collections.deque(maxlen=4)
UNIQUE: set[Any] = set()
STATE = types.SimpleNamespace(table=None, other=3)
LAST: Tensor | None = None


@pytest.fixture(autouse=True)
def seen_by_the_garbage_collector() -> Iterator[None]:
    """Let it look at what this module keeps: `conftest` takes all that was imported from it."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@functools.lru_cache(maxsize=4)
def memoized(size: int) -> Tensor:
    return torch.arange(size).float()


def closure():
    kept: Tensor | None = None

    def positions(size: int) -> Tensor:
        nonlocal kept
        if kept is None:
            kept = torch.arange(size).float()
        return kept

    return positions


POSITIONS = closure()


class Output(collections.OrderedDict[str, Any]):
    """Lets nobody take anything out, as the outputs of transformers."""

    def __delitem__(self, key: str) -> None:
        raise TypeError("nothing is taken out of an output")


OUTPUT = Output()


class Owner:
    table: Any = None


class Keeps(nn.Module):
    """Keeps what it computes in eleven places, then fails or not."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(8, 8))
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        global LAST  # noqa: PLW0603
        table = torch.arange(8).float() * 2
        TABLE[8] = table
        PAIRS[8] = (table, (table.sin(), table.cos()))
        NAMED["pair"] = types.SimpleNamespace(sin=table.sin())
        SEEN.append(table)
        LATEST.append(table)
        UNIQUE.add(table)
        OUTPUT["table"] = table
        STATE.table = table
        Owner.table = table
        LAST = table
        with parametrize.cached():
            y = self.layer(self.layer(x + table))
            if self.fails:
                y = y + memoized(8) + POSITIONS(8)
                raise ValueError("of the model's own")
        return y.square().sum()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_trace_is_left(fails: bool) -> None:
    TABLE[1], SEEN[:] = "kept", ["kept"]
    model = Keeps(fails)
    call = TracedCall(model.forward, {"model": model}, (torch.randn(4, 8),), {})
    with pytest.raises(CaptureError, match="own" if fails else "changes Python state") as caught:
        capture(call)
    caught.value.__traceback__ = caught.value.__cause__ = caught.value.__context__ = None
    del caught
    gc.collect()
    assert [x for x in gc.get_objects() if type(x) is private.FunctionalTensor] == []
    assert (TABLE, PAIRS, NAMED, SEEN) == ({1: "kept"}, {}, {}, ["kept"])
    assert (list(LATEST), UNIQUE, STATE.table, Owner.table, LAST) == ([], set(), None, None, None)
    assert (STATE.other, list(OUTPUT.items())) == (3, [])
    assert parametrize._cache == {}
    model.fails = False
    model(torch.randn(4, 8)).backward()  # plainly: nobody dies of what the trace has left
    for kept in (TABLE, PAIRS, NAMED, SEEN, LATEST, UNIQUE, OUTPUT):
        kept.clear()
    Owner.table = STATE.table = None
    memoized.cache_clear()


BY_KIND: dict[type, str] = {}


class KnowsKinds(nn.Module):
    """Keeps what it has found out about a kind of tensor, as libraries for many backends do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        BY_KIND.setdefault(type(x), "a tensor")
        return self.layer(x).square().sum()


def test_what_is_kept_by_kind_of_tensor_is_no_change() -> None:
    model = KnowsKinds()
    BY_KIND[Tensor] = "a tensor"
    capture(TracedCall(model.forward, {"model": model}, (torch.randn(4, 8),), {}))
    assert {Tensor: "a tensor"} == BY_KIND
    BY_KIND.clear()
