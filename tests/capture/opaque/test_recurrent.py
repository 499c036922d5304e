"""Recurrent modules are cut per layer, stacks of attention are looked into; bits stay."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.api.prove import prove
from tightfit.capture.capture import capture
from tightfit.capture.opaque.call import OpaqueCall
from tightfit.capture.opaque.needs import NoRoomToMeasure
from tightfit.capture.traced_call import TracedCall
from tightfit.session.handles import fitted_of
from tightfit.zoo import Example


class Reader(nn.Module):
    def __init__(self, kind: Any, layers: int, states: bool = False, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layers = kind(16, 24, layers, **options)
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = None
        layers = self.layers
        if self.states:
            count = layers.num_layers * (2 if layers.bidirectional else 1)
            rows = x.shape[0] if layers.batch_first else x.shape[1]
            first = torch.full((count, rows, 24), 0.1)
            hidden = (first, first * 2) if isinstance(layers, nn.LSTM) else first
        output, last = layers(self.words(x), hidden)
        last = last[0].mean() * last[1] if isinstance(last, tuple) else last
        return output.square().mean() + last.sin().mean()


def trained(model: nn.Module, size: int = 9) -> list[Tensor]:
    torch.manual_seed(1)
    found: list[Tensor] = []
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.randint(0, 50, (6, size)))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"layers": 4}),
        (nn.LSTM, {"layers": 3, "bidirectional": True, "dropout": 0.3, "states": True}),
        (nn.LSTM, {"layers": 2, "proj_size": 5, "batch_first": True}),
        (nn.GRU, {"layers": 3, "dropout": 0.2, "batch_first": True}),
        (nn.GRU, {"layers": 2, "bidirectional": True, "states": True}),
        (nn.RNN, {"layers": 3, "nonlinearity": "relu", "bias": False}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_each_layer_is_an_op_and_every_bit_is_the_same(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Reader(kind, **options)
    expected = trained(copy.deepcopy(model))
    fitted = tightfit.fit(model, "1GiB", costs="unit", cache=False)
    assert all(torch.equal(a, b) for a, b in zip(trained(fitted), expected, strict=True))
    graph = fitted_of(fitted).specialisations[-1].captured.graph
    layers = [op for op in graph.ops if op.target == "tightfit.opaque_forward"]
    assert len(layers) == options["layers"]
    fitted_of(fitted).close_step()
    report = tightfit.report(fitted)
    assert report.measured is not None
    assert report.measured.program_bytes <= report.planned_peak_bytes


def test_marked_recurrent_modules_stay_one_op() -> None:
    model = Reader(nn.GRU, 2)
    tightfit.opaque(model.layers)
    call = TracedCall(model.forward, {"model": model}, (torch.randint(0, 50, (6, 9)),), {})
    graph = capture(call).graph
    assert [op.target for op in graph.ops].count("tightfit.opaque_forward") == 1


class Weighted(nn.Module):
    """A recurrent module weighs its own inputs, which are laid out otherwise than its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layers = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.weigh = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x)
        weights = self.weigh(self.layers(words)[0]).softmax(dim=1)
        return (weights * words).sum(dim=1).square().mean()


def test_gradients_added_to_others_lie_as_those_do_and_measuring_ends() -> None:
    torch.manual_seed(0)
    model = Weighted()
    expected = trained(copy.deepcopy(model))
    fitted = tightfit.fit(model, "1GiB", cache=False)
    assert all(torch.equal(a, b) for a, b in zip(trained(fitted), expected, strict=True))


class Attention(nn.Module):
    """A stack of encoder layers asks whether its mask is the causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 16)  # most of the parameters
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(self.words(x), mask=self.mask).square().mean()


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: Reader(nn.LSTM, 4), (64, 16)), (Attention, (8, 24))],
    ids=["4-layer LSTM", "encoder"],
)
def test_recurrent_models_are_proven_at_three_fifths_of_the_peak(
    make: Any, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    example = Example(make(), None, (torch.randint(0, 50, shape),), None)
    proof = prove(example, budget_ratio=0.6, steps=2, rounds=0, costs="unit")
    assert proof.succeeded


def test_a_stack_of_attention_with_large_embeddings_is_looked_into() -> None:
    torch.manual_seed(0)
    model = Attention()
    expected = trained(copy.deepcopy(model), 24)
    fitted = tightfit.fit(model, "1GiB", costs="unit", cache=False)
    assert all(torch.equal(a, b) for a, b in zip(trained(fitted, 24), expected, strict=True))
    fitted_of(fitted).close_step()
    ops = [op.target for part in tightfit.report(fitted).parts for op in part.graph.ops]
    assert not [target for target in ops if "opaque" in target]
    assert sum("scaled_dot_product" in target or "bmm" in target for target in ops) >= 3


class Halting(Reader):
    """Asks data between two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        times = 1.5 if float(self.words(x).detach().mean()) > 0 else 0.5
        return super().forward(x) * times


@pytest.mark.parametrize("reader", [Reader, Halting], ids=["one graph", "several"])
def test_where_nothing_has_room_to_be_measured_it_runs_as_plain_pytorch(
    reader: type[Reader], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[object] = []

    @contextlib.contextmanager
    def refusing(call: object) -> Iterator[None]:
        tried.append(call)
        raise NoRoomToMeasure("no room", budget_bytes=1 << 22, minimum_bytes=1 << 23)
        yield

    model = reader(nn.LSTM, 1)
    expected = trained(copy.deepcopy(model))
    monkeypatch.setattr("tightfit.capture.opaque.tracing.naming_its_needs", refusing)
    tightfit.fit(model, "4MiB", cache=False)
    assert all(map(torch.equal, trained(model), expected))
    assert "no room to measure a module that runs as one op" in capsys.readouterr().err
    assert len(tried) <= 2  # not in every step


def test_a_fitted_layer_that_runs_again_in_backward_runs_without_another_plan() -> None:
    """As others within its budget are called before its backward, it keeps the least at first."""

    def rolled_out(words: nn.Module, layer: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        found: list[Tensor] = []
        for _ in range(3):
            state = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)
            for _ in range(2):  # a policy that acts: no backward of these calls is to come
                _, state = layer(words(torch.randn(1, 1, 8)).relu(), state)
            output, _ = layer(words(torch.randn(5, 1, 8)).relu())
            output.square().mean().backward()
            for parameter in (*words.parameters(), *layer.parameters()):
                assert parameter.grad is not None
                found.append(parameter.grad.clone())
        return found

    models = nn.Linear(8, 24), nn.LSTM(24, 16)
    expected = rolled_out(*copy.deepcopy(models))
    budget = tightfit.Budget("1GiB")
    words, layer = (tightfit.fit(m, budget, costs="unit", cache=False) for m in models)
    assert all(map(torch.equal, rolled_out(words, layer), expected))
    assert tightfit.report(layer).overhead > 0


def test_a_model_that_is_one_op_itself_is_named_by_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: set[str] = set()

    @contextlib.contextmanager
    def noting(call: OpaqueCall) -> Iterator[None]:
        measured.add(call.title)
        yield

    monkeypatch.setattr("tightfit.capture.opaque.tracing.naming_its_needs", noting)
    model = tightfit.fit(nn.LSTM(8, 8), "4MiB", costs="unit", cache=False)
    model(torch.randn(5, 3, 8))[0].sum().backward()
    assert measured == {"LSTM"}
