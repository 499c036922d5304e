"""Models that allow no single graph: planned part by part, the code between them runs eagerly."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import CaptureError, InfeasibleBudget
from tightfit.execution.attach import attached
from tightfit.studies.comparison import Comparison
from tightfit.zoo import Example

WIDTH = 32
LIMITS = (1.5, 0.01)  # enough to find the same least plans also on a busy machine


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        h = nn.functional.dropout(self.norm(self.up(x)).tanh(), 0.1)
        return x + self.down(h * h.sigmoid()) * scale


class Encoder(nn.Module):
    """Leaves layers out at random, by Python's generator, as no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            if random.random() > 0.25:
                x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.encoder = Encoder()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def forward(self, x):
        h = self.encoder(self.first(x) / float(x.norm()))
        order = numpy.argsort(h.detach().sum(1).numpy())  # beyond any tracer
        return self.head(h[torch.from_numpy(order)])


def runs_every_layer(seed: int) -> bool:
    generator = random.Random(seed)
    return all(generator.random() > 0.25 for _ in range(5))


FIRST_SEED = next(seed for seed in range(1000) if runs_every_layer(seed))
"""The first step runs all layers, so that what it takes is the least that suffices always."""


def train(model: nn.Module, optimizer, batches, forward=None) -> list[torch.Tensor]:
    kept = []
    for number, x in enumerate(batches):
        torch.manual_seed(number), random.seed(FIRST_SEED + number)
        loss = (forward or model)(x).square().mean()
        loss.backward()
        kept += [loss.detach().clone(), torch.rand(1)]
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return kept + [t.detach().clone() for t in model.state_dict().values()]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(7)
    return [torch.randn(256, WIDTH) for _ in range(count)]


@pytest.fixture(scope="module")
def range_bytes() -> tuple[int, int]:
    """What steps with the least plans take, and steps in plenty of memory."""
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model)
    tightfit.fit(model, "1GiB", optimizer=optimizer, costs="unit", limits=LIMITS)
    peaks, held = [], batches(8)
    for x in held[:3]:
        train(model, optimizer, [x])
        peaks.append(attached(model).close_step().peak_bytes)
    momentum = sum(p.nbytes for p in model.parameters())
    return peaks[0] + momentum, peaks[-1]


@pytest.mark.parametrize("share", [0.2, 0.5, 4.0])
def test_the_same_bits_inside_the_budget(share: float, range_bytes, capsys) -> None:
    least, most = range_bytes
    budget = int(least + share * (most - least)) + 8192
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    reference = train(plain, optimizer_of(plain), batches(8))
    optimizer = optimizer_of(model)
    options = {"costs": "unit", "limits": LIMITS}
    tightfit.fit(model, budget, optimizer=optimizer, **options)
    trained = train(model, optimizer, batches(8))
    assert all(torch.equal(a, b) for a, b in zip(trained, reference, strict=True))
    report = tightfit.report(model)
    steps = attached(model).guard.steps
    assert len(steps) == 8
    assert all(step.peak_bytes <= budget for step in steps)
    assert {name.rpartition(".")[0] for name in report.plans} == {"encoder.layers", ""}
    assert (report.overhead > 0) == (share < 1)
    assert "outside of every plan" in capsys.readouterr().err
    assert not [m for m in model.modules() if m is not model and "forward" in vars(m)]


def test_a_proof_at_the_least_budget_and_above() -> None:
    torch.manual_seed(0)
    example = Example(Model(), lambda y, _: y.square().mean(), (torch.randn(256, WIDTH),), None)
    comparison = Comparison(example, steps=2, name="model", costs="unit", limits=LIMITS)
    least = comparison.least_bytes()
    eager = comparison.eager.peak_bytes
    for budget in (least, (least + eager) // 2):
        proof = comparison.at(budget, rounds=0)
        assert proof.succeeded
        assert abs(proof.prediction_error) <= 0.01
    with pytest.raises(InfeasibleBudget):
        comparison.at(least - (eager - least) // 4, rounds=0)


def test_a_function_of_several_modules() -> None:
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    options = {"costs": "unit", "limits": LIMITS}
    optimizer = optimizer_of(model)
    step = tightfit.step(lambda x: model(x) * 2, modules=model, budget="1GiB", **options)
    reference = train(plain, optimizer_of(plain), batches(3), lambda x: plain(x) * 2)
    trained = train(model, optimizer, batches(3), step)
    assert all(torch.equal(a, b) for a, b in zip(trained, reference, strict=True))


class Reader(nn.Module):
    """Uses what the encoder gives to all readers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory):
        return x + (self.key(memory) * x).tanh() * self.value(memory), self.unused(x)


class Drawn(nn.Module):
    """Leaves layers of its encoder out by numbers it draws with PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.readers = nn.ModuleList(Reader() for _ in range(3))

    def forward(self, x):
        memory = y = x * 1.0
        for layer in self.encoder:
            if torch.rand([]) > 0.3:
                memory = layer(memory)
        for reader in self.readers:
            y, _ = reader(y, memory)
        return (y * memory).mean(1)


def trained_as_plainly(kind: type[nn.Module]) -> nn.Module:
    """Train a model plainly and fitted, with the same bits; return the fitted one."""
    torch.manual_seed(0)
    plain, model = kind(), kind()
    model.load_state_dict(plain.state_dict())
    reference = train(plain, optimizer_of(plain), batches(4))
    optimizer = optimizer_of(model)
    tightfit.fit(model, "1GiB", optimizer=optimizer, costs="unit", cache=False, limits=LIMITS)
    trained = train(model, optimizer, batches(4))
    assert all(torch.equal(a, b) for a, b in zip(trained, reference, strict=True))
    return model


def test_gradients_of_what_parts_share_are_added_as_in_eager(capsys) -> None:
    model = trained_as_plainly(Drawn)
    assert tightfit.report(model).calls >= 3
    assert "Data-dependent branching" in capsys.readouterr().err


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, WIDTH, sparse=True)
        self.block = Block()

    def forward(self, tokens):
        return self.block(self.words(tokens))


class WordsTwice(Words):
    def forward(self, tokens):
        return self.block(self.words(tokens) + self.words(tokens.flip(0)))


@pytest.mark.parametrize("kind", [Words, WordsTwice])
def test_sparse_gradients_outside_planned_blocks(kind) -> None:
    torch.manual_seed(0)
    plain, model = kind(), kind()
    model.load_state_dict(plain.state_dict())
    tightfit.fit(model, "1GiB", costs="unit", cache=False, limits=LIMITS)
    tokens = [torch.randint(0, 500, (64,)) for _ in range(4)]
    results = []
    for each in (plain, model):
        optimizer = torch.optim.SparseAdam(each.words.parameters())
        results.append(train(each, optimizer, tokens))
        assert each.words.weight.grad is None or each.words.weight.grad.is_sparse
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_budget_below_the_least_names_the_block(range_bytes) -> None:
    least, _ = range_bytes
    model = Model()
    tightfit.fit(
        model,
        3 * least // 5,  # a forward by itself fits
        optimizer=optimizer_of(model),
        costs="unit",
        cache=False,
        limits=LIMITS,
    )
    with pytest.raises(InfeasibleBudget, match=r"part 'encoder.layers.\d' needs.*as a whole"):
        train(model, optimizer_of(model), batches(1))


def test_it_is_not_planned_beforehand() -> None:
    model = Model()
    tightfit.fit(model, "1GiB", costs="unit", cache=False, limits=LIMITS)
    said = r"no single graph.*planned one by one when it is trained"
    with pytest.raises(CaptureError, match=said):
        tightfit.prepare(model, *batches(1))
    train(model, optimizer_of(model), batches(1))
    assert tightfit.report(model).calls > 0


class Untraceable(Block):
    def forward(self, x):
        return super().forward(x, scale=float(self.up(x).detach().norm()))


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Untraceable()

    def forward(self, x):
        number = float(self.inner.up(x).detach().norm())
        return self.inner(x) / (number if number > 1e-3 else 1.0)


def test_what_computes_numbers_between_its_graphs_is_planned_around_them() -> None:
    trained_as_plainly(Hidden)


class Decoder(nn.Module):
    """Runs its cell step by step; the last state is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Reader()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        memory, outputs = x / float(x.norm()), []
        for _ in range(3):
            y, memory = self.cell(x, memory)
            outputs.append(self.head(y))
        return torch.stack(outputs)


def test_an_output_that_only_some_calls_need_the_gradient_of() -> None:
    trained_as_plainly(Decoder)
