"""Alternatives are compared with their defaults where they are priced; liars are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit.alternatives.assembling import Assembly
from tightfit.alternatives.base import Extension, Implementation, OpView
from tightfit.alternatives.registry import with_alternatives
from tightfit.capture.capture import capture
from tightfit.capture.captured import Captured
from tightfit.capture.traced_call import TracedCall
from tightfit.graph.ir import EXACTNESS
from tightfit.pricing.exactness import GradualComparison, compare_alternatives, without_inexact
from tightfit.pricing.quick import quick_costs
from tightfit.progress import SILENT


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))


class Net(nn.Module):
    """An activation of which alternatives may lie."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return F.max_pool2d(F.silu(self.layer(x)), 2).mean()


def traced(batch: int = 2, size: int = 12) -> Captured:
    model = Net()
    return capture(TracedCall(model, {"model": model}, (torch.randn(batch, 3, size, size),), {}))


def nearly(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * (1 + 1e-6)


def far(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x).contiguous(memory_format=torch.channels_last)


def with_way(function: Any, exactness: Any, batch: int = 2, size: int = 12) -> Captured:
    step = traced(batch, size)
    op = next(op for op in step.graph.ops if op.target == "aten.silu")
    view = OpView(step, op)
    assembly = Assembly(step)
    offer = Implementation("silu.other", function, view.call.args, exactness=exactness)
    assembly.add(op, Extension((offer,)), EXACTNESS)
    return assembly.finished()


def names(captured: Captured) -> set[str]:
    return {offer.name for op in captured.graph.ops for offer in op.alternatives} - {"default"}


@pytest.mark.parametrize(
    ("function", "exactness", "kept"),
    [
        (F.silu, "bitwise", True),
        (nearly, "bitwise", False),
        (nearly, "rounding", True),
        (far, "rounding", False),
        (far, "lossy", True),
        (transposed, "bitwise", False),
        (transposed, "lossy", False),
    ],
)
@pytest.mark.parametrize("price", [without_inexact, quick_costs])
def test_an_alternative_that_breaks_its_promise_is_left_out(price, function, exactness, kept):
    priced: Any = price(with_way(function, exactness), SILENT)
    captured = priced if price is without_inexact else priced.captured
    assert ("silu.other" in names(captured)) is kept
    assert len(captured.calls) == len(captured.graph.ops) == len(captured.nodes)


@pytest.mark.parametrize(("exactness", "kept"), [("bitwise", set()), ("rounding", {"silu.other"})])
def test_what_has_no_room_to_be_compared_is_left_out_if_it_promises_the_same_bits(exactness, kept):
    captured = with_way(nearly, exactness)
    assert names(compare_alternatives(captured, SILENT, room_bytes=10).captured) == kept


def only_large(x: torch.Tensor) -> torch.Tensor:
    return nearly(x) if len(x) > 4 else F.silu(x)


@pytest.mark.parametrize(
    ("function", "room_kib", "kept", "named"),
    [
        (F.silu, 30, True, True),  # one result after the other
        (nearly, 30, False, False),
        (only_large, 30, False, False),
        (F.silu, 20, False, True),  # on fewer rows
        (nearly, 20, False, False),
        (only_large, 20, False, True),
    ],
)
def test_in_little_room_one_is_used_that_was_compared_whole_and_named_that_was_on_fewer_rows(
    function, room_kib, kept, named
):
    step = with_way(function, "bitwise", batch=8)  # 12.5 KiB of which something is made
    captured = quick_costs(step, SILENT, room_bytes=room_kib << 10).captured
    assert ("silu.other" in names(captured)) is kept
    graph = captured.larger_budget_graph or captured.graph
    assert ("silu.other" in {offer.name for op in graph.ops for offer in op.alternatives}) is named


def test_elementwise_operators_are_compared_on_as_many_rows_as_there_is_room_for():
    captured = with_alternatives(traced())
    offered = {name for name in names(captured) if "over_argument" in name}
    assert offered
    assert offered <= names(compare_alternatives(captured, SILENT, room_bytes=12 << 10).captured)


def test_what_has_no_room_to_run_by_itself_is_left_out():
    captured = with_way(nearly, "rounding")
    assert names(quick_costs(captured, SILENT, room_bytes=10).captured) == set()


def test_a_backward_is_compared_on_what_its_forward_makes():
    captured = with_alternatives(traced())
    offered = names(captured)
    assert {"max_pool.from_offsets"} <= offered
    assert names(without_inexact(captured, SILENT)) == offered


class Words(nn.Module):
    """Words that are embedded by the weight that the next one is guessed with."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 8)

    def forward(self, words):
        logits = F.linear(self.embedding(words), self.embedding.weight)
        return F.cross_entropy(logits, words)


LOGITS_BYTES = 64 * 500 * 4


@pytest.mark.parametrize(
    ("room_bytes", "kept"),
    [
        (int(2.5 * LOGITS_BYTES), True),  # the default of the backward works with three times them
        (LOGITS_BYTES // 2, True),
        (10, False),
    ],
)
def test_rows_that_are_treated_by_themselves_are_compared_on_as_many_as_have_room(room_bytes, kept):
    model = Words()
    call = TracedCall(model, {"model": model}, (torch.randint(500, (64,)),), {})
    priced = quick_costs(with_alternatives(capture(call)), SILENT, room_bytes=room_bytes)
    assert (names(priced.captured) >= {"cross_entropy.fused"}) is kept


def test_what_writes_over_its_arguments_is_compared_one_after_the_other_too():
    model = Words()
    call = TracedCall(model, {"model": model}, (torch.randint(500, (64,)),), {})
    captured = with_alternatives(capture(call))
    offered = {name for name in names(captured) if name == "tied_embedding.folded"}
    room_bytes = 3 * 500 * 8 * 4 + 4096  # not for three of each argument
    kept = compare_alternatives(captured, SILENT, room_bytes=room_bytes)
    assert offered <= names(kept.captured)
    assert offered
    assert not kept.on_rows


ROOM_BYTES = 1 << 30


def test_what_takes_long_to_compare_is_left_for_later_and_none_is_used_before():
    step = with_alternatives(traced(batch=32, size=64))
    first = quick_costs(step, SILENT, room_bytes=ROOM_BYTES, postpones=True).captured
    assert first.with_postponed is not None
    assert names(first) < names(first.with_postponed) == names(step)
    assert {"max_pool.from_offsets"} <= names(first.with_postponed) - names(first)
    compared_in_turns = GradualComparison(first.with_postponed)
    turns = 1
    while not compared_in_turns.go_on(1e-9, ROOM_BYTES):
        turns += 1
    assert turns > 1
    compared = quick_costs(first.with_postponed, SILENT, room_bytes=ROOM_BYTES).captured
    kept = names(without_inexact(step, SILENT))
    assert names(compared) == kept > names(first)
    again = quick_costs(step, SILENT, room_bytes=ROOM_BYTES, postpones=True).captured
    assert again.with_postponed is None
    assert names(again) == kept


@pytest.mark.parametrize(("function", "kept"), [(F.silu, True), (nearly, False)])
def test_what_was_left_for_later_is_used_if_it_keeps_its_promise(function, kept):
    step = with_way(function, "bitwise", batch=32, size=64)
    first = quick_costs(step, SILENT, room_bytes=ROOM_BYTES, postpones=True).captured
    assert first.with_postponed is not None
    assert names(first) == set()
    assert names(first.with_postponed) == {"silu.other"}
    compared = quick_costs(first.with_postponed, SILENT, room_bytes=ROOM_BYTES).captured
    assert ("silu.other" in names(compared)) is kept


def test_small_operators_are_compared_at_once():
    step = with_alternatives(traced())
    first = quick_costs(step, SILENT, room_bytes=ROOM_BYTES, postpones=True).captured
    assert first.with_postponed is None
    assert names(first) == names(step)
