"""One battery for every operator alternative: the default's bits on real data, of every dtype.

A step is captured with its alternatives and its operators run one after the other on real
tensors; wherever an operator has alternatives, each runs on copies of the same inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from support.models import UpdatingNet
from tightfit.allocator import measure_peak
from tightfit.alternatives.base import Contributor, OpView
from tightfit.alternatives.convolutions.cudnn import convolution_by_cudnn
from tightfit.alternatives.in_place import IN_PLACE, add_over_second
from tightfit.alternatives.linear_cross_entropy import loss_and_gradients
from tightfit.alternatives.max_pool import Windows
from tightfit.alternatives.norms.again import normalise_with_statistics
from tightfit.alternatives.registry import ENTRIES, with_alternatives
from tightfit.alternatives.stash import (
    compressed,
    compressed_bytes,
    halved,
    restored,
    widened,
)
from tightfit.alternatives.tied_embedding import add_embedding_gradient_
from tightfit.alternatives.together import (
    Intermediate,
    Link,
    Norm,
    Read,
    run_together,
    run_together_over,
)
from tightfit.capture.capture import capture
from tightfit.capture.captured import Call, Captured, placeholder_tensors
from tightfit.capture.nodes import base_of, is_getitem, storage_bytes
from tightfit.capture.traced_call import TracedCall
from tightfit.graph.ir import Alternative
from tightfit.pricing.exactness import TOLERANCES, without_inexact
from tightfit.pricing.price import measured_costs
from tightfit.progress import SILENT
from tightfit.torch_private import core as private

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LAYOUTS = (torch.contiguous_format, torch.channels_last)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 6.0, math.nan, math.inf, -math.inf, 1e-40)


class Normalised(nn.Module):
    """Convolutions, BatchNorm, and activations whose inputs and gradients may be overwritten."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, affine=affine)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)))
        for activation in (
            F.hardtanh,
            F.leaky_relu,
            F.elu,
            torch.sigmoid,
            torch.tanh,
            F.gelu,
            F.silu,
        ):
            h = activation(self.second(h).unsqueeze(0).mean(0))  # its gradient is divided by 1
        return (self.second(h) * self.second(h * 2) + self.first(x).pow(3)).mean()


class Words(nn.Module):
    """Tied embeddings and a cross entropy."""

    def __init__(self, reduction: str = "mean", bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7000, 12)
        self.head = nn.Linear(12, 7000, bias=bias)
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


def step_of(model: nn.Module, *inputs: torch.Tensor, exactness: Any = "bitwise") -> Captured:
    return with_alternatives(capture(TracedCall(model, {"model": model}, inputs, {})), exactness)


def contributors_to(model: nn.Module, *inputs: torch.Tensor) -> set[Contributor]:
    """Who offers alternatives in a model's step."""
    plain = capture(TracedCall(model, {"model": model}, inputs, {}))
    return {
        entry.contributor
        for op, node in zip(plain.graph.ops, plain.nodes, strict=True)
        for entry in ENTRIES
        if entry.operators is None or node.target in entry.operators
        if entry.contributor(OpView(plain, op))
    }


class Battery:
    """Runs a captured step op by op; compares each alternative with the default where it runs."""

    def __init__(self, captured: Captured, arguments: list[Any]) -> None:
        self.captured = captured
        self.made = dict(zip(captured.joint.placeholders, arguments, strict=True))
        self.compared: Counter[str] = Counter()
        self.workspace: dict[Any, int] = {}

    def run(self) -> None:
        for op, node, calls in zip(
            self.captured.graph.ops, self.captured.nodes, self.captured.calls, strict=True
        ):
            nodes = {n for call in calls for n in call.nodes() if self.is_made(n)}
            before = {n: copied(self.value(n)) for n in nodes} if len(calls) > 1 else {}
            generator = torch.get_rng_state()
            result = self.called(calls[0])
            self.made[node] = result
            expected = values_of(calls[0], result)
            for alternative, call in zip(op.alternatives[1:], calls[1:], strict=True):
                with torch.random.fork_rng():
                    torch.set_rng_state(generator)
                    made = self._alternative(call, before)
                self._compare(alternative, expected, values_of(call, made))
                if alternative.exactness == "rounding":
                    self._compare_with_double(calls[0], before, expected, values_of(call, made))
                self.compared[alternative.name] += 1

    def is_made(self, node: fx.Node) -> bool:
        base = node.args[0] if is_getitem(node) else base_of(node)
        return node.op == "get_attr" or node in self.made or base in self.made

    def value(self, node: fx.Node) -> Any:
        if node in self.made:
            return self.made[node]
        if node.op == "get_attr":
            return getattr(self.captured.joint.module, node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        return node.target(*args, **kwargs)

    def called(self, call: Call) -> Any:
        args, kwargs = fx.map_arg((call.args, call.kwargs), self.value)
        return call.function(*args, **kwargs)

    def _arguments(self, call: Call, before: dict[fx.Node, Any]) -> Any:
        def argument(node: fx.Node) -> Any:
            return copied(before[node] if node in before else self.value(node))

        return fx.map_arg((call.args, call.kwargs), argument)

    def _alternative(self, call: Call, before: dict[fx.Node, Any]) -> Any:
        args, kwargs = self._arguments(call, before)
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
            elif alternative.exactness == "rounding" and tensor.numel():
                tolerance = TOLERANCES[tensor.dtype] * reference.abs().max().item()
                torch.testing.assert_close(tensor, reference, rtol=0, atol=tolerance)

    def _compare_with_double(
        self,
        default: Call,
        before: dict[fx.Node, Any],
        expected: dict[int, torch.Tensor],
        made: dict[int, torch.Tensor],
    ) -> None:
        """What rounds otherwise is about as far from the true numbers as the default is."""
        args, kwargs = private.pytree.tree_map_only(
            torch.Tensor,
            lambda x: x.double() if x.is_floating_point() else x,
            self._arguments(default, before),
        )
        exact = values_of(default, default.function(*args, **kwargs))
        for value, tensor in made.items():
            if tensor.dtype == torch.float64 or not tensor.numel():
                continue
            scale = exact[value].abs().max().item() * torch.finfo(tensor.dtype).eps
            error, usual = ((t[value] - exact[value]).abs().max() for t in (made, expected))
            assert error <= 4 * usual + 4 * scale


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
    """The bits of a tensor's elements; what is no number has one form only."""
    if tensor.is_floating_point():
        tensor = tensor.where(~tensor.isnan(), math.nan)
    return tensor.contiguous().view(-1).view(torch.uint8)


def run_battery(
    model: nn.Module, *inputs: torch.Tensor, exactness: str = "bitwise"
) -> Counter[str]:
    """Compare every alternative of a model's step; return how often each was compared."""
    return battery_of(model, step_of(model, *inputs, exactness=exactness), *inputs).compared


def battery_of(
    model: nn.Module,
    captured: Captured,
    *inputs: torch.Tensor,
    tangent: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Battery:
    tensors = iter(placeholder_tensors(captured.joint, {"model": model}, list(inputs)))
    arguments = [
        (tangent or ones_like)(node.meta["val"]) if source.kind == "tangent" else next(tensors)
        for node, source in zip(captured.joint.placeholders, captured.joint.sources, strict=True)
    ]
    battery = Battery(captured, [*map(copied, arguments)])
    with torch.no_grad():
        battery.run()
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images_by_the_operator_of_gpus(dtype: torch.dtype, layout: torch.memory_format) -> None:
    model = UpdatingNet().to(dtype).to(memory_format=layout)
    compared = run_battery(model, image(dtype, layout))
    assert compared["batch_norm.update_again"] == 2


def test_images_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_battery(Normalised(True), image(torch.float32, torch.contiguous_format))


class Between(nn.Module):
    """A function of an image; its gradient is that of the parameter that is added to the image."""

    def __init__(self, function: Callable[[Any], Any], like: torch.Tensor) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros_like(like))
        self.function = function

    def forward(self, x):
        return self.function(x + self.shift) + 1


def normal(like: torch.Tensor) -> torch.Tensor:
    """Random numbers, laid out as another tensor, real or fake."""
    return ones_like(like).copy_(torch.randn(tuple(like.shape), dtype=like.dtype))


def special(like: torch.Tensor) -> torch.Tensor:
    """Random numbers with every special one in between."""
    x = torch.randn(like.numel(), dtype=like.dtype)
    some = x[:: max(1, x.numel() // len(SPECIAL))][: len(SPECIAL)]
    some.copy_(torch.tensor(SPECIAL[: some.numel()]))
    return ones_like(like).copy_(x.view(like.shape))


def shaped(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
    """Return a tensor of zeros; if it is a batch of images, of that layout."""
    if len(shape) == 5 and layout is torch.channels_last:
        layout = torch.channels_last_3d
    zeros = torch.zeros(shape, dtype=dtype)
    return zeros.contiguous(memory_format=layout) if len(shape) > 3 else zeros


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu.from_bits": F.relu,
    "hardsigmoid.from_bits": F.hardsigmoid,
    "hardtanh.from_output": F.relu6,
    "leaky_relu.from_output": lambda x: F.leaky_relu(x, 0.2),
    "elu.from_output": F.selu,
    "softplus.from_output": F.softplus,
}


PLACES = [(shape, torch.contiguous_format) for shape in ((2, 8, 5, 5), (3, 7), (1,), (300_001,))]


@pytest.mark.parametrize(
    ("shape", "layout"), [*PLACES, ((2, 8, 5, 5), torch.channels_last)], ids=str
)
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16), ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations_from_less_than_their_input(name, dtype, layout, shape) -> None:
    rounds = name in ("elu.from_output", "softplus.from_output")
    numbers = normal if rounds else special  # what rounds is near where it is finite
    x = numbers(shaped(shape, dtype, layout))
    model = Between(ACTIVATIONS[name], x)
    captured = step_of(model, x, exactness="rounding")
    assert battery_of(model, captured, x, tangent=numbers).compared[name] == 1


class Residual(nn.Module):
    """What runs together: a BatchNorm and an activation, two of them and their sum, a gate."""

    def __init__(self, activation: Callable[[Any], Any], channels: int = 8) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels, affine=i < 2) for i in range(3))
        self.gate = nn.Parameter(torch.rand(channels, 1, 1)[None])
        self.activation = activation

    def forward(self, x):
        h = self.activation(self.norms[0](self.convolutions[0](x)))
        first = self.norms[1](self.convolutions[0](h))
        h = self.activation(first + self.norms[2](self.convolutions[1](h)))
        return self.activation(h * self.gate + x)


TOGETHER: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu,
    "hardtanh": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("name", TOGETHER)
def test_elementwise_operators_together_with_those_before_them(name, layout) -> None:
    x = torch.randn(2, 8, 11, 13).contiguous(memory_format=layout)
    model = Residual(TOGETHER[name]).to(memory_format=layout)
    compared = run_battery(model, x)
    assert compared[f"aten.{name}.together_2"] >= 1  # behind the first BatchNorm
    assert compared[f"aten.{name}.together_4"] == 1  # behind the sum of two


class Gated(nn.Module):
    """What a gate scales: an activation behind a BatchNorm, which is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.BatchNorm2d(8), nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        h = F.silu(self.norm(x))
        return h * torch.sigmoid(self.gate * h.mean())


@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
def test_the_gradient_of_a_gate_is_made_without_what_it_scales(layout) -> None:
    x = normal(shaped((2, 8, 11, 13), torch.float32, layout))
    model = Gated().to(memory_format=layout)
    captured = step_of(model, x)
    ways = {w.name: w.reads for op in captured.graph.ops for w in op.alternatives}
    scaled = next(op for op in captured.graph.ops if op.target == "aten.silu").alternatives[0]
    assert {*scaled.writes}.isdisjoint(ways["aten.mul.Tensor.together_3"])
    compared = battery_of(model, captured, x, tangent=normal).compared
    assert compared["aten.mul.Tensor.together_3"] == 1


@pytest.mark.parametrize("shape", [(2, 3, 300, 310), (70, 40, 11, 11), (300_001, 3)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
def test_stretches_of_large_tensors_are_put_together_again(shape, layout) -> None:
    x, skip, gradient = (shaped(shape, torch.float32, layout).normal_() for _ in range(3))
    channels = [torch.rand(shape[1]) for _ in range(4)]
    normed = normalise_with_statistics(x, *channels)
    norm = Norm(*map(Read, range(5)))
    both = Link(torch.ops.aten.add.Tensor, (Intermediate(0), Read(5)))
    last = Link(torch.ops.aten.relu.default, (Intermediate(1),))
    where = tuple(x.shape), tuple(x.stride())
    made = run_together((norm, both, last), *where, x, *channels, skip)
    assert torch.equal(made, F.relu(normed + skip)) and made.stride() == x.stride()
    back = Link(torch.ops.aten.silu_backward.default, (Read(0), Intermediate(0)))
    norm = Norm(*map(Read, range(1, 6)))
    expected = torch.ops.aten.silu_backward.default(gradient, normed)
    assert run_together_over((norm, back), *where, gradient, x, *channels) is gradient
    torch.testing.assert_close(gradient, expected)


def test_an_exponential_keeps_its_bits_where_stretches_are_whole_vectors() -> None:
    step_of_shape = {}
    for shape in ((2, 64, 56, 56), (2, 3, 301, 301)):
        norm = nn.BatchNorm2d(shape[1])
        x = torch.randn(shape)
        captured = step_of(nn.Sequential(norm, nn.SiLU()), x, exactness="rounding")
        ways = [way for op in captured.graph.ops for way in op.alternatives]
        step_of_shape[shape] = {w.exactness for w in ways if "silu" in w.name}
    assert [*step_of_shape.values()] == [{"bitwise"}, {"rounding"}]


class Alone(nn.Module):
    """A norm whose weights are drawn, some of them negative, none of them near zero."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.scale = norm, nn.Parameter(torch.tensor(1.0))
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
            parameter.data.add_(0.5 * parameter.data.sign())

    def forward(self, x):
        return torch.sin(self.norm(x * self.scale))


NORMS: tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...]], ...] = (
    ("batch_norm", lambda: nn.BatchNorm2d(8), (4, 8, 7, 9)),
    ("batch_norm", lambda: nn.BatchNorm1d(8, affine=False), (30, 8)),
    ("batch_norm", lambda: nn.BatchNorm3d(4), (2, 4, 3, 4, 5)),
    ("layer_norm", lambda: nn.LayerNorm(12), (2, 7, 12)),
    ("layer_norm", lambda: nn.LayerNorm((5, 700)), (90, 5, 700)),
    ("layer_norm", lambda: nn.LayerNorm(12, bias=False), (9, 12)),
    ("layer_norm", lambda: nn.LayerNorm(12, elementwise_affine=False), (9, 12)),
    ("group_norm", lambda: nn.GroupNorm(2, 8), (4, 8, 7, 9)),
    ("group_norm", lambda: nn.GroupNorm(8, 8, affine=False), (4, 8, 5)),
    ("rms_norm", lambda: nn.RMSNorm(12), (2, 7, 12)),
    ("rms_norm", lambda: nn.RMSNorm(700), (400, 700)),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "make", "shape"), NORMS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(NORMS)]
)
def test_gradients_of_norms_from_their_output(name, make, shape, dtype, layout) -> None:
    """Never of an output in half precision, which leaves too little of what was normalised."""
    model = Alone(make()).to(dtype)
    x = normal(shaped(shape, dtype, layout))
    captured = without_inexact(step_of(model, x, exactness="rounding"), SILENT)
    compared = battery_of(model, captured, x, tangent=normal).compared
    odd = name == "group_norm" and layout is torch.channels_last and len(shape) > 3
    if not odd:  # its kernels lay out results otherwise
        times = int(dtype is not torch.bfloat16)
        if name == "rms_norm":  # which PyTorch takes apart, and runs in single precision at least
            times = 3
        assert compared[f"{name}.from_output"] == times


class Attention(nn.Module):
    """Four heads over tokens, as models lay them out."""

    def __init__(self, causal: bool, width: int = 32) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 3 * width)
        self.causal = causal

    def forward(self, x):
        three = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.inputs(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*three, is_causal=self.causal)
        return torch.sin(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("tokens", [2, 17, 49])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_attention_by_its_formula(dtype, causal, tokens) -> None:
    model = Attention(causal).to(dtype)
    x = torch.randn(3, tokens, 32, dtype=dtype)
    captured = without_inexact(step_of(model, x, exactness="rounding"), SILENT)
    compared = battery_of(model, captured, x, tangent=normal).compared
    assert compared["attention.formula"] == 2


POOLS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 3, 8, 8), {"kernel_size": 2}),
    ((2, 3, 9, 7), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ((2, 3, 9, 8), {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0), "dilation": 2}),
    ((2, 3, 10, 11), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    ((3, 20, 20), {"kernel_size": 16, "stride": 2}),
    ((2, 3, 6, 7, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ((2, 3, 6, 6, 9), {"kernel_size": (2, 3, 2), "dilation": (1, 2, 3), "ceil_mode": True}),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "how"), POOLS, ids=str)
def test_max_pooling_from_offsets(shape, how, dtype, layout) -> None:
    pool = F.max_pool3d if len(shape) == 5 else F.max_pool2d
    x = special(shaped(shape, dtype, layout))
    model = Between(lambda h: pool(h, **how), x)
    battery = battery_of(model, step_of(model, x), x, tangent=normal)
    assert battery.compared["max_pool.from_offsets"] == 1


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("shape", [(2, 8, 5, 5), (300_001,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_from_bits(dtype, shape, probability) -> None:
    x = torch.randn(shape, dtype=dtype)
    model = Between(lambda h: F.dropout(h, probability), x)
    battery = battery_of(model, step_of(model, x), x, tangent=special)
    names = "dropout.from_bits", "dropout.mask_again", "dropout.in_stretches"
    assert [battery.compared[name] for name in names] == [1, 1, 1]


def test_a_gradient_of_dropout_is_written_over_that_of_its_output() -> None:
    x = torch.randn(300_001)
    model = Between(lambda h: F.dropout(h, 0.3).tanh(), x)
    battery = battery_of(model, step_of(model, x), x, tangent=special)
    assert battery.compared["dropout.in_stretches.over_argument_0"] == 1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_words(dtype: torch.dtype, reduction: str) -> None:
    compared = run_battery(Words(reduction).to(dtype), torch.randint(0, 7000, (2, 5)))
    assert compared["cross_entropy.fused"] == compared["tied_embedding.folded"] == 1


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_last_layer_and_its_cross_entropy_by_rows(dtype, reduction, bias) -> None:
    model = Words(reduction, bias=bias).to(dtype)
    words = torch.randint(0, 7000, (2, 40))
    words[0, :5] = 3  # which does not count
    captured = step_of(model, words, exactness="rounding")
    assert len(captured.graph.choices) == 1
    compared = battery_of(model, captured, words, tangent=normal).compared
    assert compared["linear_cross_entropy.by_rows"] == 1
    assert compared["linear_cross_entropy.scaled"] == 2 + bias


def test_a_loss_of_which_no_row_counts_is_not_a_number_and_its_gradients_are_zero() -> None:
    x, weight, target = torch.randn(6, 3), torch.randn(3, 9), torch.full((6,), -100)
    loss, total, *gradients = loss_and_gradients(x, weight, None, target, 1, -100, 4)
    assert loss.isnan() and total == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


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


def test_offsets_that_no_maximum_has_do_not_write_outside_the_image() -> None:
    """Costs are measured on tensors of zeros, and a padded window begins outside."""
    windows = Windows(sizes=(5, 5), extents=(3, 3), strides=(2, 2), padding=(1, 1))
    starts = windows.starts((3, 3), torch.device("cpu"))
    places = windows.in_image(torch.zeros(3, 3, dtype=torch.uint8), starts)
    assert places.min() >= 0 and places.max() < 25


class Convolutions(nn.Module):
    """Grouped, strided, transposed, dilated and one-dimensional ones between activations."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            activation(),
            nn.Conv2d(8, 16, 3, padding=2, dilation=2),
            activation(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            activation(),
            nn.Conv2d(16, 32, 1),
            activation(),
            nn.ConvTranspose2d(32, 16, 2, stride=2),
            activation(),
            nn.Conv2d(16, 8, 3, stride=2, padding=1),
            activation(),
            nn.Flatten(2),
            nn.Conv1d(8, 8, 3),
        )

    def forward(self, images):
        return self.layers(images).mean()


@pytest.mark.parametrize(("activation", "split"), [(nn.GELU, 6), (nn.SiLU, 6), (nn.ReLU, 3)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolutions_are_split_where_they_read_a_value_last_or_are_large(
    dtype, layout, activation, split
) -> None:
    """Those that shrink their input too: the transposed convolution makes its gradient."""
    model = Convolutions(activation).to(dtype).to(memory_format=layout)
    x = normal(shaped((2, 3, 16, 16), dtype, layout))
    battery = battery_of(model, step_of(model, x), x)
    flat = split == 6 and layout is torch.channels_last  # what the last one reads is not dense
    assert battery.compared["convolution.split"] == split - flat


def by_images() -> nn.Module:
    """Grouped, dilated, strided and transposed convolutions of more than a megabyte each."""
    return nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=2, dilation=2),
        nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
        nn.ConvTranspose2d(32, 16, 2, stride=2, bias=False),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_convolutions_by_images(dtype, layout) -> None:
    """Of a batch that is no multiple of what runs at once; kept are those that keep their bits."""
    model = by_images().to(dtype).to(memory_format=layout)
    x = normal(shaped((9, 8, 40, 40), dtype, layout))
    captured = without_inexact(step_of(model, x, exactness="rounding"), SILENT)
    compared = battery_of(model, captured, x, tangent=normal).compared
    assert compared["convolution.by_images_1"] + compared["convolution.by_images_2"] >= 4
    assert compared["convolution.gradients_by_images_2"] >= 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=["NCHW", "channels_last"])
def test_the_backward_reads_what_was_kept_in_fewer_bytes(layout) -> None:
    """A ReLU's output without its zeros has every bit: it is rounded only if it has too few."""
    x = torch.randn(2, 8, 11, 13).contiguous(memory_format=layout)
    model = Residual(F.relu).to(memory_format=layout)
    captured = step_of(model, x, exactness="lossy")
    compared = battery_of(model, captured, x, tangent=normal).compared
    kinds = Counter(name.split(".")[0] for name in compared.elements())
    assert kinds["from_half"] > kinds["from_sparse"] >= 3


@pytest.mark.parametrize("shape", [(3, 7), (2, 8, 5, 5), (300_001,), (2, 300, 1000)], ids=str)
@pytest.mark.parametrize("filled", [0.0, 0.3, 0.5, 0.9])
def test_a_tensor_without_its_zeros_comes_back(shape, filled) -> None:
    x = special(torch.zeros(shape)).where(torch.rand(shape) < filled, 0.0)
    packed = compressed(x, x.stride())
    assert packed.numel() == compressed_bytes(x.numel())
    made = restored(packed, shape, x.stride())
    if filled < 0.6:
        assert torch.equal(bits(made), bits(x))
    else:
        assert torch.equal(bits(made), bits(widened(halved(x, x.stride()))))
        finite = x.isfinite()
        torch.testing.assert_close(made[finite], x[finite], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("padding", ["valid", "same", 1])
def test_a_convolution_that_reads_more_than_its_gradient(padding) -> None:
    """As a decoder's of what was concatenated; "valid" is one number for all sides."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3, padding=padding), nn.ReLU()
    )
    assert run_battery(model, torch.randn(2, 3, 20, 20))["convolution.split"] >= 1


class Writing(nn.Module):
    """Writes into parts of a tensor that it has made, in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        y[:, 1].add_(x[:, 0])
        y[:, 1:3].mul_(x[:, :2])
        y.diagonal(0, 2, 3).mul_(x.diagonal(0, 2, 3))
        rows = torch.tensor([2, 0], device=x.device)
        y[rows] = x[1:3] * 3
        y.index_add_(0, rows, x[:2] * 4).index_copy_(1, rows, x[:, :2] * 5)
        place = x.argsort(dim=1)[:, :1]
        y.scatter_(1, place, x[:, 1:2] * 6).scatter_add_(1, place, x[:, 2:] * 7)
        y.scatter_(2, place, 0.5)
        return y.masked_fill_(x > 0.9, 8.0) * 9


def test_writes_into_parts_of_a_tensor() -> None:
    """Each is done in the tensor's layout, as the model does it, and has the default's bits."""
    compared = run_battery(Writing(), torch.rand(4, 3, 5, 5))
    ways = {name.rpartition(".over_argument_0")[0] for name in compared}
    parts = ("select_scatter", "slice_scatter", "diagonal_scatter", "scatter_add", "index_put")
    assert {f"aten.{part}" for part in parts} <= ways


def test_of_an_empty_batch_nothing_is_made_otherwise() -> None:
    """Some ways are not offered; those that are give what the default gives."""
    x = torch.zeros(0, 8, 6, 6)
    for function in (*ACTIVATIONS.values(), partial(F.max_pool2d, kernel_size=2), F.dropout):
        model = Between(function, torch.zeros(8, 6, 6))
        battery_of(model, step_of(model, x, exactness="rounding"), x)
    norms = nn.LayerNorm(6), nn.RMSNorm(6), nn.GroupNorm(2, 8)
    for layer in (nn.Conv2d(8, 8, 3, padding=1), *norms):
        battery_of(layer, step_of(layer, x, exactness="rounding"), x)


def one_of_each() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """A model of each kind that the battery compares, with its input."""
    images = torch.randn(4, 3, 9, 9)
    yield Normalised(True), images
    yield UpdatingNet(), images
    yield Words(), torch.randint(0, 7000, (2, 40))
    yield Residual(F.relu), torch.randn(2, 8, 11, 13)
    yield Convolutions(nn.GELU), torch.randn(2, 3, 16, 16)
    yield by_images(), torch.randn(2, 8, 64, 64)
    yield Attention(True), torch.randn(2, 17, 32)
    for norm in (nn.BatchNorm2d(3), nn.LayerNorm(9), nn.RMSNorm(9), nn.GroupNorm(1, 3)):
        yield Alone(norm), images
    yield Writing(), torch.rand(4, 3, 5, 5)
    functions = (
        *ACTIVATIONS.values(),
        partial(F.max_pool2d, kernel_size=2),
        partial(F.dropout, p=0.5),
    )
    for function in functions:
        yield Between(function, images), images


def test_every_registered_operator_is_compared() -> None:
    """A new contributor needs a case of its own in this battery."""
    compared: set[str] = set()
    contributors: set[Contributor] = set()
    for model, x in one_of_each():
        compared.update(run_battery(model, x, exactness="lossy"))
        contributors |= contributors_to(model, x)
    compared |= {name.rpartition(".")[0] for name in compared}
    overwriters = {target.name().replace("::", ".") for target in IN_PLACE}
    assert overwriters <= compared
    on_gpus = {convolution_by_cudnn}
    assert contributors == {entry.contributor for entry in ENTRIES} - on_gpus
