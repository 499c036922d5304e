"""Prices at once: the bytes that many measurements give, from one run of few calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tightfit.allocator import measure_peak
from tightfit.alternatives.registry import with_alternatives
from tightfit.alternatives.together import run_together
from tightfit.capture.capture import capture
from tightfit.capture.captured import Captured
from tightfit.capture.opaque import ops
from tightfit.capture.traced_call import TracedCall
from tightfit.costs.measured import call
from tightfit.graph.ir import Graph
from tightfit.pricing import records
from tightfit.pricing.fewer_rows import FewerRows
from tightfit.pricing.keys import key_of
from tightfit.pricing.price import measured_costs
from tightfit.pricing.quick import quick_costs
from tightfit.progress import SILENT


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))


class Images(nn.Module):
    """Convolutions, a norm, activations in place and not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.first(x)))
        h = F.gelu(self.second(h)) * 0.5 + h.sigmoid()
        return (h.mean((2, 3)) > 0.1).to(h.dtype).mul(h.sum((2, 3))).log_softmax(-1).mean()


class Places(nn.Module):
    """Reads one place of its input after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.embed(x)
        total = rows[:, 0]
        for place in range(1, rows.shape[1]):
            total = torch.tanh(total + rows[:, place])
        return total.sum()


def step_of(model: nn.Module, *inputs: torch.Tensor) -> Captured:
    return with_alternatives(capture(TracedCall(model, {"model": model}, inputs, {})))


CASES: dict[str, Callable[[], Captured]] = {
    "images": lambda: step_of(Images(), torch.randn(2, 3, 12, 12)),
    "channels last": lambda: step_of(
        Images().to(memory_format=torch.channels_last),
        torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last),
    ),
    "bfloat16": lambda: step_of(Images().bfloat16(), torch.randn(2, 3, 12, 12).bfloat16()),
    "words": lambda: step_of(nn.LSTMCell(5, 7), torch.randn(3, 5)),
    "places": lambda: step_of(Places(), torch.randn(3, 5, 4)),
    "transposed": lambda: step_of(
        nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Softmax(-1)), torch.randn(6, 5).t()
    ),
}


@contextlib.contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the keys of the calls that get arguments, in order."""
    ran: list[str] = []
    own = records.synthetic_arguments

    def noted(module: Any, call: Any, made: Any) -> Any:
        ran.append(key_of(call))
        return own(module, call, made)

    with monkeypatch.context() as patched:
        patched.setattr(records, "synthetic_arguments", noted)
        yield ran


def quick(captured: Captured, **keywords: Any) -> Graph:
    return quick_costs(captured, SILENT, **keywords).captured.graph


def bytes_of(graph: Graph) -> list[Any]:
    ways = [
        (way.name, [variant.workspace_bytes for variant in way.variants])
        for op in graph.ops
        for way in op.alternatives
    ]
    return [*ways, *(value.size_bytes for value in graph.values)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_workspaces_sizes_and_layouts_are_those_of_many_measurements(
    case: Callable[[], Captured],
) -> None:
    captured = case()
    ours = quick_costs(captured, SILENT)
    theirs = measured_costs(captured, SILENT)
    assert bytes_of(ours.captured.graph) == bytes_of(theirs.captured.graph)
    assert ours.strides == theirs.strides
    assert all(
        variant.cost_s > 0
        for op in ours.captured.graph.ops
        for way in op.alternatives
        for variant in way.variants
    )


class Product(nn.Module):
    """A matrix times another, as they lie, turned, or with gaps between rows."""

    def __init__(self, sizes: tuple[int, int], ways: tuple[str, str], dtype: torch.dtype) -> None:
        super().__init__()
        rows, columns = sizes[::-1] if ways[1] == "turned" else sizes
        gap = 3 if ways[1] == "with gaps" else 0
        self.weight = nn.Parameter(torch.randn(rows, columns + gap, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(sizes[1], dtype=dtype))
        self.ways, self.sizes = ways, sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = {"turned": x.t(), "with gaps": x[:, : self.sizes[0]]}.get(self.ways[0], x)
        weight = self.weight[:, : self.sizes[1]] if self.ways[1] == "with gaps" else self.weight
        weight = self.weight.t() if self.ways[1] == "turned" else weight
        return torch.addmm(self.bias, x, weight).sum() + torch.mm(x, weight).square().sum()


@settings(max_examples=25)
@given(
    st.tuples(*[st.sampled_from((1, 2, 17, 256))] * 3),
    st.tuples(*[st.sampled_from(("contiguous", "turned", "with gaps"))] * 2),
    st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
)
def test_what_products_take_is_known_without_running_them(
    sizes: tuple[int, int, int], ways: tuple[str, str], dtype: torch.dtype
) -> None:
    rows, inner, columns = sizes
    shapes = {"contiguous": (rows, inner), "turned": (inner, rows), "with gaps": (rows, inner + 5)}
    model = Product((inner, columns), ways, dtype)
    captured = step_of(model, torch.randn(shapes[ways[0]], dtype=dtype))
    ours, theirs = quick_costs(captured, SILENT), measured_costs(captured, SILENT)
    assert bytes_of(ours.captured.graph) == bytes_of(theirs.captured.graph)
    assert ours.strides == theirs.strides


@settings(max_examples=25)
@given(
    st.sampled_from((torch.softmax, torch.log_softmax)),
    st.tuples(*[st.sampled_from((1, 3, 64, 1000))] * 2),
    st.integers(-2, 1),
    st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
)
def test_what_softmaxes_take_is_known_without_running_them(
    softmax: Callable[..., torch.Tensor], sizes: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(sizes, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = softmax(x * self.weight, dim)
            return (rows * rows.sin() + softmax((x + self.weight).t(), dim).t()).sum()

    captured = step_of(Rows(), torch.randn(sizes, dtype=dtype))
    ours, theirs = quick_costs(captured, SILENT), measured_costs(captured, SILENT)
    assert bytes_of(ours.captured.graph) == bytes_of(theirs.captured.graph)
    assert ours.strides == theirs.strides


def test_a_call_runs_once_and_never_when_the_disk_knows_it(monkeypatch) -> None:
    captured = CASES["images"]()
    with running(monkeypatch) as ran:
        first = quick(captured)
    assert ran
    assert len(set(ran)) == len(ran)
    assert len(ran) < len({key_of(call) for calls in captured.calls for call in calls})
    with running(monkeypatch) as ran:
        assert quick(captured) == first
    assert ran == []


def test_an_opaque_module_is_timed_roughly_while_a_step_waits(monkeypatch) -> None:
    timed = []
    monkeypatch.setattr(
        ops,
        "measure_call",
        lambda *given, **named: timed.append(0) or call.measure_call(*given, **named),
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 8))

    class Last(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return model(x)[0].sum()

    captured = capture(TracedCall(Last(), {"model": model}, (torch.randn(5, 2, 4),), {}))
    ours = quick(captured)
    assert timed == []
    theirs = measured_costs(captured, SILENT).captured.graph
    assert timed
    assert bytes_of(ours) == bytes_of(theirs)


def test_what_was_measured_well_is_not_run_and_counts(monkeypatch) -> None:
    captured = CASES["images"]()
    measured = measured_costs(captured, SILENT).captured.graph
    with running(monkeypatch) as ran:
        ours = quick(captured)
    assert ran == []
    convolutions = [op.id for op in measured.ops if "convolution" in op.target]
    assert convolutions
    assert all(ours.ops[n].alternatives == measured.ops[n].alternatives for n in convolutions)


def test_a_call_without_room_does_not_run_and_is_priced_by_its_like(monkeypatch) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(n, n) for n in (8, 64)])

        def forward(self, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
            outputs = [layer(x) for layer, x in zip(self.layers, (small, large), strict=True)]
            return torch.stack([x.sum() for x in outputs]).sum()

    captured = step_of(Growing(), torch.randn(4, 8), torch.randn(4, 64))
    peaks: list[int] = []

    def metered(function: Callable[[], Any], /, *, device: torch.device) -> Any:
        result, peak = measure_peak(function, device=device)
        peaks.append(peak.peak_bytes)
        return result, peak

    monkeypatch.setattr(call, "measure_peak", metered)
    room = 4 << 10
    graph = quick(captured, room_bytes=room)
    assert peaks
    assert max(peaks) <= room  # of Linear(64) the weight alone is larger
    products = sorted(
        (op.flops, op.alternatives[0].variants[0].cost_s) for op in graph.ops if op.flops
    )
    assert products[-1][0] > 30 * products[0][0]
    assert products[-1][1] > products[0][1] > 0


def test_a_call_without_room_runs_on_fewer_rows_for_its_workspace() -> None:
    captured = step_of(Images(), torch.randn(16, 3, 12, 12))
    whole, little = quick(captured), quick(captured, room_bytes=112 << 10)  # three rows
    both = zip(whole.ops, little.ops, strict=True)
    taken = {
        op.target: (one.alternatives[0].variants[0].workspace_bytes, workspace.workspace_bytes)
        for op, one in both
        for workspace in op.alternatives[0].variants
        if "convolution" in op.target
    }
    assert taken
    assert all(few == pytest.approx(every, rel=0.1) for few, every in taken.values()), taken


def test_what_there_was_no_room_to_run_is_told_apart() -> None:
    """A proof counts no workspace that was not measured; advice allows for more than predicted."""
    captured = step_of(Images(), torch.randn(1, 3, 12, 12))  # one image: there are no fewer rows
    whole = quick_costs(captured, SILENT).captured
    little = quick_costs(captured, SILENT, room_bytes=8 << 10).captured
    assert not whole.predicted and whole.predicted_bytes == 0
    assert whole.with_predicted(0) is whole
    assert little.predicted_bytes > 0

    def workspaces(step: Captured) -> list[int]:
        return [op.alternatives[0].variants[0].workspace_bytes for op in step.graph.ops]

    predicted = workspaces(little)
    for op, size in enumerate(workspaces(little.with_predicted(0))):
        assert size == (0 if op in little.predicted else predicted[op])
    for op, size in enumerate(workspaces(little.with_predicted(2.0))):
        assert size == (2 * predicted[op] if op in little.predicted else predicted[op])


def test_a_weight_that_was_cast_has_no_rows_of_the_batch() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).sum()

    x = torch.randn(4, 4, 12, 12)  # as many images as there are channels
    step = capture(TracedCall(cast, {"model": model}, (x,), {}))
    ops = [op.id for op in step.graph.ops if op.target == "aten.convolution_backward"]
    assert len(ops) == 2
    for op in ops:
        call = step.calls[op][0]
        few = FewerRows(step, list(call.nodes()), 2).call(call)
        gradient, x_of_it, weight = (given.meta["val"].shape for given in few.args[:3])
        assert (gradient[0], x_of_it[0], weight[0]) == (2, 2, 4)


def test_a_shape_of_two_numbers_has_fewer_rows_too() -> None:
    """Two numbers may be strides of a kernel: they are a shape where a tensor has that shape."""
    model = nn.Linear(32, 32)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(model(x)).sigmoid().mul(0.5).tanh().square().sum()

    call = TracedCall(loss, {"model": model}, (torch.randn(64, 32),), {})
    step = with_alternatives(capture(call))
    calls = [call for ways in step.calls for call in ways if call.function is run_together]
    assert calls
    for whole in calls:
        few = FewerRows(step, list(whole.nodes()), 19).call(whole)
        assert whole.args[1] == (64, 32) and few.args[1] == (19, 32)


def test_costs_of_another_shape_are_scaled_and_elementwise_calls_do_not_run(monkeypatch) -> None:
    model = Images()
    small = quick(step_of(model, torch.randn(2, 3, 12, 12)))
    larger = step_of(model, torch.randn(4, 3, 12, 12))
    with running(monkeypatch) as ran:
        graph = quick(larger, neighbour=small)
    operators = [key.splitlines()[0] for key in ran]
    assert not any("gelu" in name or "sigmoid" in name for name in operators)
    assert "scaled from another shape" in graph.cost_source
    for op, like in zip(graph.ops, small.ops, strict=True):
        if "convolution" in op.target:
            ratio = op.alternatives[0].variants[0].cost_s / like.alternatives[0].variants[0].cost_s
            assert 1.9 < ratio < 2.1


def test_calls_that_differ_only_in_where_they_write_run_once(monkeypatch) -> None:
    captured = CASES["places"]()
    writes = [op for op in captured.graph.ops if "select_backward" in op.target]
    assert len(writes) == 5
    with running(monkeypatch) as ran:
        quick(captured)
    assert sum("select_backward" in key for key in ran) == 1
