"""One battery for every operator alternative: the default's bits on real data, of every dtype.

A step is captured with its alternatives and its operators run one after the other on real
tensors; wherever an operator has alternatives, each runs on copies of the same inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from support.models import UpdatingNet
from tightfit.allocator import measure_peak
from tightfit.alternatives.in_place import IN_PLACE, add_over_second
from tightfit.alternatives.registry import CONTRIBUTORS, with_alternatives
from tightfit.alternatives.tied_embedding import add_embedding_gradient_
from tightfit.capture.capture import capture
from tightfit.capture.captured import Call, Captured, placeholder_tensors
from tightfit.capture.nodes import is_getitem, storage_bytes
from tightfit.capture.traced_call import TracedCall
from tightfit.graph.ir import Alternative
from tightfit.pricing.price import measured_costs
from tightfit.progress import SILENT

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LAYOUTS = (torch.contiguous_format, torch.channels_last)
RAN: Counter[str] = Counter()


class Normalised(nn.Module):
    """Convolutions, BatchNorm, and activations whose inputs and gradients may be overwritten."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, affine=affine)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)))
        for activation in (F.hardtanh, F.leaky_relu, torch.sigmoid, torch.tanh, F.gelu, F.silu):
            h = activation(self.second(h).unsqueeze(0).mean(0))  # its gradient is divided by 1
        return (self.second(h) * self.second(h * 2) + self.first(x).pow(3)).mean()


class Words(nn.Module):
    """Tied embeddings and a cross entropy."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.embedding = nn.Embedding(7000, 12)
        self.head = nn.Linear(12, 7000, bias=False)
        self.head.weight = self.embedding.weight
        self.reduction = reduction

    def forward(self, words):
        logits = self.head(torch.tanh(self.embedding(words)))
        loss = F.cross_entropy(
            logits.flatten(0, 1), words.flatten(), reduction=self.reduction, ignore_index=3
        )
        return loss.sum()


def image(dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
    return torch.randn(4, 3, 9, 9, dtype=dtype).contiguous(memory_format=layout)


def step_of(model: nn.Module, *inputs: torch.Tensor) -> Captured:
    return with_alternatives(capture(TracedCall(model, {"model": model}, inputs, {})))


class Battery(fx.Interpreter):
    """Runs a captured step; compares each alternative with the default where it runs."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.joint.module, garbage_collect_values=False)
        self.captured = captured
        self.op_of = {node: number for number, node in enumerate(captured.nodes)}
        self.compared: Counter[str] = Counter()
        self.workspace: dict[Any, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        number = self.op_of.get(n)
        if number is None or len(self.captured.graph.ops[number].alternatives) == 1:
            return super().run_node(n)
        op, calls = self.captured.graph.ops[number], self.captured.calls[number]
        before = {node: copied(self.env[node]) for node in self.env}
        result = super().run_node(n)
        expected = values_of(calls[0], result)
        for alternative, call in zip(op.alternatives[1:], calls[1:], strict=True):
            made = self._run(call, before, n, result)
            self._compare(alternative, expected, values_of(call, made))
            self.compared[alternative.name] += 1
        return result

    def _run(self, call: Call, before: dict[fx.Node, Any], default: fx.Node, result: Any) -> Any:
        def argument(node: fx.Node) -> Any:
            if node in before:
                return copied(before[node])
            if is_getitem(node) and node.args[0] is default:
                return copied(result[node.args[1]])
            return node.target(*fx.map_arg(node.args, argument), **node.kwargs)

        args, kwargs = fx.map_arg((call.args, call.kwargs), argument)
        made, peak = measure_peak(
            lambda: call.function(*args, **kwargs), device=torch.device("cpu")
        )
        self.workspace[call.function] = peak.peak_bytes - max(0, peak.growth_bytes)
        return made

    def _compare(
        self,
        alternative: Alternative,
        expected: dict[int, torch.Tensor],
        made: dict[int, torch.Tensor],
    ) -> None:
        assert {*made} == {*alternative.writes} <= {*expected}
        for value, tensor in made.items():
            reference = expected[value]
            assert tensor.dtype == reference.dtype and tensor.shape == reference.shape
            assert tensor.stride() == reference.stride(), alternative.name
            size = self.captured.graph.values[value].size_bytes
            assert 0 <= size - storage_bytes(tensor) < 64, alternative.name
            if alternative.exactness == "bitwise":
                assert torch.equal(bits(tensor), bits(reference)), alternative.name


def ones_like(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(fake.shape), fake.stride(), dtype=fake.dtype).fill_(1)


def copied(value: Any) -> Any:
    """Copy a tensor with its strides, so that an alternative may write over it."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(value, memory_format=torch.preserve_format).copy_(value)


def values_of(call: Call, result: Any) -> dict[int, torch.Tensor]:
    results = result if call.is_tuple else (result,)
    return {v: t for v, t in zip(call.outputs, results, strict=False) if v is not None}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def run_battery(model: nn.Module, *inputs: torch.Tensor) -> Counter[str]:
    """Compare every alternative of a model's step; return how often each was compared."""
    return battery_of(model, step_of(model, *inputs), *inputs).compared


def battery_of(model: nn.Module, captured: Captured, *inputs: torch.Tensor) -> Battery:
    tensors = iter(placeholder_tensors(captured.joint, {"model": model}, list(inputs)))
    arguments = [
        ones_like(node.meta["val"]) if source.kind == "tangent" else next(tensors)
        for node, source in zip(captured.joint.placeholders, captured.joint.sources, strict=True)
    ]
    battery = Battery(captured)
    with torch.no_grad():
        battery.run(*map(copied, arguments), enable_io_processing=False)
    return battery


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images(dtype: torch.dtype, layout: torch.memory_format, affine: bool) -> None:
    model = Normalised(affine).to(dtype).to(memory_format=layout)
    compared = run_battery(model, image(dtype, layout))
    assert compared["batch_norm.again"] == 1
    RAN.update(compared)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images_by_the_operator_of_gpus(dtype: torch.dtype, layout: torch.memory_format) -> None:
    model = UpdatingNet().to(dtype).to(memory_format=layout)
    compared = run_battery(model, image(dtype, layout))
    assert compared["batch_norm.update_again"] == 2
    RAN.update(compared)


def test_images_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        RAN.update(run_battery(Normalised(True), image(torch.float32, torch.contiguous_format)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_words(dtype: torch.dtype, reduction: str) -> None:
    compared = run_battery(Words(reduction).to(dtype), torch.randint(0, 7000, (2, 5)))
    assert compared["cross_entropy.fused"] == compared["tied_embedding.folded"] == 1
    RAN.update(compared)


def test_no_alternative_works_with_more_memory_on_real_data_than_was_measured() -> None:
    """Costs are measured on tensors of one value; what is planned must cover all data."""
    model, words = Words(), torch.arange(0, 7000, 100).reshape(2, 35)
    captured = measured_costs(step_of(model, words), SILENT).captured
    battery = battery_of(model, captured, words)
    assert add_embedding_gradient_ in battery.workspace
    for op, calls in zip(captured.graph.ops, captured.calls, strict=True):
        for alternative, call in zip(op.alternatives[1:], calls[1:], strict=True):
            measured = alternative.variants[0].workspace_bytes
            assert battery.workspace[call.function] <= measured + 1024, alternative.name


def test_every_registered_operator_was_compared() -> None:
    if not RAN:
        pytest.skip("the battery did not run")
    named = {name.rpartition(".")[0] for name in RAN} | {*RAN}
    overwriters = {target.name().replace("::", ".") for target in IN_PLACE}
    assert {t for t in overwriters if t not in named} == set()
    others: set[Callable[..., Any]] = {c for cs in CONTRIBUTORS.values() for c in cs}
    families = {name.partition(".")[0] for name in RAN}
    assert len(others) == 5, "a new contributor: add its case to this battery"
    assert {"batch_norm", "cross_entropy", "tied_embedding"} <= families


def test_a_sum_is_written_over_its_second_argument_only_where_it_is_laid_out_as_that() -> None:
    whole = torch.randn(2, 8, 4, 4)
    second = torch.randn(2, 4, 4, 4)
    for first, in_place in (
        (whole[:, :4], True),  # a slice is not dense, yet the sum is laid out as the second
        (torch.randn(4, 1, 1), True),
        (torch.randn(2, 4, 4, 4).to(memory_format=torch.channels_last), False),
    ):
        expected = first + second
        mine = second.clone()
        result = add_over_second(mine, first)
        assert (result is mine) is in_place
        assert torch.equal(result, expected) and result.stride() == expected.stride()
