"""Dynamo follows the Python of what is fitted, each graph is planned."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.allocator import meter_for
from tightfit.errors import BudgetExceeded, InfeasibleBudget
from tightfit.execution.attach import attached

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")


def fitted_twin(model: nn.Module, budget: str = "1GiB") -> nn.Module:
    return tightfit.fit(copy.deepcopy(model), budget, costs="unit", cache=False)


def trained(model: nn.Module, step: Callable[[nn.Module, Tensor], Tensor]) -> list[Any]:
    """Return the losses, gradients and buffers of four steps, and random numbers that follow."""
    found: list[Any] = []
    for seed in range(4):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = step(model, torch.randn(4, 8))
        loss.backward()
        found += [loss.detach(), torch.rand(1), *(p.grad for p in model.parameters())]
        found += [b.detach().clone() for b in model.buffers()]
    return found


def assert_trains_alike(model: nn.Module, step: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    fitted = fitted_twin(model)
    pairs = zip(trained(fitted, step), trained(model, step), strict=True)
    for mine, reference in pairs:
        assert (mine is None) == (reference is None)
        assert mine is None or torch.equal(mine, reference)
    return fitted


def graphs_of(fitted: nn.Module) -> int:
    runs = attached(fitted)
    assert runs is not None
    return len(runs.specialisations)  # type: ignore[attr-defined]


class Counting(nn.Module):
    """Counts its calls in an attribute, and computes with that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(self.norm(self.layer(x))).square().mean()[None] * self.calls


class Logging(nn.Module):
    """Appends a computed number to a list, between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 8))
        self.last = nn.Linear(8, 2)
        self.seen = 0
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        h = self.first(x)
        self.log.append(float(h.mean()))
        return self.last(h).square().sum()


class Cell(nn.Module):
    """Carries its state, with its history, in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.weights(x) + self.state)
        return self.state


class Scaled(nn.Module):
    """Decides by its values; every instance has the same code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if h.max() > self.largest:
            self.largest = self.largest + h.detach().max()
        return h / self.largest


class Simple(nn.Module):
    """What another module puts in its place amid a forward."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Changing(nn.Module):
    """Replaces a part of itself in its first forward, which Python makes amid a break."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.Linear):
            torch._dynamo.graph_break()
            self.inner = Simple(self.inner)
        return self.inner(x)


class Masked(nn.Linear):
    """Assigns to the data of its weight in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 0.5
        return super().forward(x)


def test_a_counter_makes_two_graphs() -> None:
    fitted = assert_trains_alike(Counting(), lambda m, x: m(x))
    assert fitted.calls == 4
    assert graphs_of(fitted) == 2


def test_code_between_two_graphs_runs_eagerly_and_is_announced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Logging()
    fitted = assert_trains_alike(model, lambda m, x: m(x))
    assert (fitted.log, fitted.seen) == (model.log, model.seen)
    said = capsys.readouterr().err
    assert said.count("the code where Dynamo ends a graph runs eagerly, outside of every plan") == 1


def test_a_frame_of_ever_new_graphs_is_left_to_python_and_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A list that grows makes a graph in every call; the blocks inside stay planned."""
    model = Logging()
    fitted = fitted_twin(model)
    for net in (model, fitted):
        for seed in range(10):
            torch.manual_seed(seed)
            net(torch.randn(4, 8)).backward()
    assert fitted.log == model.log
    for mine, reference in zip(fitted.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, reference.grad)
    assert "the outermost forward runs eagerly" in capsys.readouterr().err


class Flow(nn.Module):
    """A function whose weights another graph has computed, and its derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weights = nn.Linear(8, 8), nn.Linear(8, 8)

    def transformed(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = (x * weights).tanh()
        return y, torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    def forward(self, x: Tensor) -> Tensor:
        x, weights = self.first(x), self.weights(x)
        print(end="")
        y, slope = self.transformed(x, weights)
        return y.square().mean() - slope.abs().log().mean()


def test_a_derivative_that_python_takes_is_of_what_python_computes() -> None:
    assert_trains_alike(Flow(), lambda m, x: m(x))


class OfEachSample(nn.Module):
    """Squares of the derivatives of each sample: values inside a `vmap` have a history."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.func.grad(lambda sample: torch.tanh(self.layer(sample)).sum())
        return torch.func.vmap(energy)(x).square().sum()


def test_derivatives_of_each_sample_are_planned() -> None:
    assert graphs_of(assert_trains_alike(OfEachSample(), lambda m, x: m(x))) == 1


def test_where_dynamo_fails_a_frame_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo has errors that it does not wrap: a view whose base had fewer dimensions before."""

    def failing(*_: Any) -> bool:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("torch._dynamo.pgo.FrameStateSizeEntry.is_stride_dynamic", failing)
    assert_trains_alike(Counting(), lambda m, x: m(x))


@pytest.mark.parametrize("is_cut", [False, True], ids=["through all calls", "truncated"])
def test_a_buffer_that_is_replaced_keeps_its_history(is_cut: bool) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        model.state = torch.zeros(4, 8)
        losses = []
        for _ in range(3):
            losses.append(model(x).sum())
            if is_cut:
                model.state = model.state.detach()
        return sum(losses) + model.state.sum()

    assert_trains_alike(Cell(), step)


def test_a_module_that_a_forward_makes_takes_the_place_of_another() -> None:
    assert_trains_alike(Changing(), lambda m, x: m(x).sum())


class TrainsItself(nn.Module):
    """A whole step of training in a forward, as meta-learning has it."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = kind(self.layers.parameters())

    def forward(self, x: Tensor) -> float:
        loss = self.layers(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
)
def test_an_optimizer_that_steps_inside_a_forward_steps_as_plain_pytorch(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    def trained_by_itself(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model = TrainsItself(kind)
        if is_fitted:
            tightfit.fit(model, "1GiB", optimizer=model.optimizer, costs="unit", cache=False)
        losses = [model(torch.randn(4, 8)) for _ in range(4)]
        return [*losses, *(p.detach().tolist() for p in model.parameters())]

    assert trained_by_itself(True) == trained_by_itself(False)


class TrainsAndLooks(TrainsItself):
    """It needs more than its budget once it has trained."""

    def forward(self, x: Tensor) -> float:
        loss = super().forward(x)
        return loss + torch.ones(1 << 20).sum().item()


def test_a_refusal_says_that_an_optimizer_has_stepped_within_the_call() -> None:
    model = TrainsAndLooks(torch.optim.SGD)
    tightfit.fit(model, "1MiB", optimizer=model.optimizer, costs="unit", cache=False)
    with pytest.raises(BudgetExceeded, match="after the optimizer's last step, which was inside"):
        model(torch.randn(4, 8))


def test_modules_of_one_class_have_parameters_of_their_own() -> None:
    model = nn.Sequential(Scaled(), nn.Tanh(), Scaled(), Scaled())
    assert_trains_alike(model, lambda m, x: m(x).sum())


def test_an_assignment_to_data_writes_into_the_parameter() -> None:
    assert_trains_alike(
        nn.Sequential(Masked(8, 8), nn.Tanh(), Masked(8, 8)), lambda m, x: m(x).sum()
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, num_layers=2, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[None])[0]).square().mean()


class ByNumber(nn.Module):
    """No graph holds it: it asks for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if float(x.detach().sum()) > 0 else 0.5)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Recurrent, id="recurrent"),
        pytest.param(
            lambda: nn.Sequential(nn.Linear(8, 8), tightfit.opaque(ByNumber())),
            id="marked",
            marks=pytest.mark.skipif(torch.__version__ < (2, 13), reason="they end a graph"),
        ),
    ],
)
def test_modules_that_are_not_followed_are_one_operator_of_the_graph(
    model: Callable[[], nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = assert_trains_alike(model(), lambda m, x: m(x).mean())
    assert graphs_of(fitted) == 1
    assert "outside of every plan" not in capsys.readouterr().err


class OfComputedWeights(nn.Module):
    """A recurrent module with one weight that is computed in every call, before another one."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.other = rnn, nn.LSTM(8, 8, 2)
        self.raw = nn.Parameter(rnn._parameters.pop("weight_hh_l0").detach())
        rnn.flatten_parameters = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.weight_hh_l0 = nn.functional.dropout(self.raw, 0.5, self.training)
        found, _ = self.rnn(x.unsqueeze(1))
        return self.other(found)[0].square().sum()


@pytest.mark.parametrize(
    "rnn",
    [
        nn.LSTM(8, 8, 2, dropout=0.5),
        nn.GRU(8, 8, batch_first=True),
        nn.RNN(8, 4, bidirectional=True, nonlinearity="relu"),
    ],
    ids=["LSTM", "GRU", "RNN"],
)
def test_recurrent_modules_of_computed_weights_are_one_operator(
    rnn: nn.RNNBase, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = assert_trains_alike(OfComputedWeights(rnn), lambda model, x: model(x))
    graph = attached(fitted).specialisations[-1].captured.graph  # type: ignore[attr-defined]
    assert sum(op.target == "tightfit.opaque_forward" for op in graph.ops) == 3
    assert "eagerly" not in capsys.readouterr().err


def test_nothing_runs_when_it_is_prepared() -> None:
    model = Counting()
    fitted = fitted_twin(model)
    generator = torch.get_rng_state()
    report = tightfit.prepare(fitted, torch.randn(4, 8))
    assert report.planned_peak_bytes > 0
    assert fitted.calls == 0
    assert torch.equal(fitted.norm.running_mean, model.norm.running_mean)
    torch.set_rng_state(generator)


def test_a_budget_that_is_too_small_is_said_as_it_is() -> None:
    fitted = fitted_twin(nn.Sequential(Counting(), nn.Linear(1, 8192)), "160KiB")
    with pytest.raises(InfeasibleBudget, match="a plan fits"):
        fitted(torch.randn(4, 8))
    assert fitted[0].calls == 0


def test_errors_of_the_model_are_its_own() -> None:
    fitted = fitted_twin(nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fitted(torch.randn(4, 8))


def test_a_fitted_model_keeps_its_class_and_identity() -> None:
    model = Counting()
    fitted = fitted_twin(model)
    fitted(torch.randn(4, 8)).backward()
    assert type(fitted) is Counting
    assert fitted.state_dict().keys() == model.state_dict().keys()
    twin = copy.deepcopy(fitted)
    plain = pickle.loads(pickle.dumps(fitted))
    torch.save(fitted, io.BytesIO())
    x = torch.randn(4, 8)
    for net in (fitted, twin, plain):
        net.zero_grad()
        torch.manual_seed(0)
        net(x).backward()
    for mine, other, third in zip(
        fitted.parameters(), twin.parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(mine.grad, other.grad)
        assert torch.equal(mine.grad, third.grad)
    assert attached(plain) is None


class Searching(nn.Module):
    """Its second layer runs where Dynamo cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return _left_to_python(self.second, self.first(x).tanh()).square().sum()


@torch.compiler.disable
def _left_to_python(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def test_gradients_that_no_plan_has_made_are_said_and_stand_in_the_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fitted = assert_trains_alike(Searching(), lambda m, x: m(x))
    assert capsys.readouterr().err.count("gradients that no plan has made: module 'second'") == 1
    report = tightfit.report(fitted)
    assert "module 'second'" in report.outside
    assert "outside of every plan" in str(report)
    assert "module 'first'" not in report.outside


class InNumPy(nn.Module):
    """Means, an order and a table of NumPy's, whose last digits are not those of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.table = numpy.linspace(0, 1, 64, dtype=numpy.float32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * torch.from_numpy(numpy.exp(self.table))
        seen = h.detach().numpy()
        order = torch.from_numpy(numpy.argsort(numpy.round(seen.sum(1))))
        return (h * torch.from_numpy(numpy.mean(seen**2, axis=0)))[order].cumsum(0).sum()


def test_what_numpy_computes_is_left_to_it() -> None:
    torch.manual_seed(0)
    plain = InNumPy()
    found: list[list[Tensor]] = []
    for model in (plain, fitted_twin(plain)):
        torch.manual_seed(1)
        for _ in range(2):
            loss = model(torch.randn(500, 64))
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class MaskedByNumpy(nn.Module):
    """Draws with NumPy which rows are masked, between operators that draw with PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.layer(x))
        count = int(2 + numpy.random.rand(1).item())
        rows = numpy.random.choice(numpy.arange(len(x)), count, replace=False)
        keep = torch.ones(len(x), 1)
        keep[torch.tensor(rows)] = 0
        return self.drop(x * keep)


def test_numbers_that_numpy_draws_are_its_own() -> None:
    torch.manual_seed(0)
    plain = MaskedByNumpy()
    model = copy.deepcopy(plain)
    tightfit.fit(model, "64MiB", costs="unit", cache=False)
    for step in range(4):
        states = []
        for net in (plain, model):
            torch.manual_seed(step)
            numpy.random.seed(step)
            net.zero_grad()
            net(torch.ones(8, 8)).square().sum().backward()
            states.append((torch.get_rng_state(), numpy.random.get_state()[1:3]))
        assert torch.equal(states[0][0], states[1][0])
        assert all(map(numpy.array_equal, states[0][1], states[1][1]))
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, expected.grad)


def test_numpy_functions_of_numbers_end_no_graph() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / numpy.sqrt(self.in_features)

    fitted = fitted_twin(Scaled(8, 8))
    fitted(torch.randn(4, 8)).sum().backward()
    assert not tightfit.report(fitted).outside


ASKING = """
def {name}(x, y):
    rows = torch.ones(3).cumsum(0)
    whole = (rows[-1:] == 3).all() if {constant} else {data}
    if not torch.compiler.is_compiling() and whole:
        return 2 * y
    return 3 * y
"""


class Asking(nn.Module):
    def __init__(self, asks: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(8, 8), asks

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.asks(x, self.layer(x)))).sum()


OF_AN_INPUT, OF_CHANCE = "(x > -100).all()", "torch.rand(1) > 0.5"


def asking_in(file: str, *, constant: bool, data: str = OF_AN_INPUT) -> Asking:
    found: dict[str, Any] = {"torch": torch}
    text = ASKING.format(name="asks", constant=constant, data=data)
    exec(compile(text, file, "exec"), found)
    return Asking(found["asks"])


LIBRARY = "/anywhere/site-packages/library/masks.py"


@pytest.mark.parametrize(
    ("file", "constant", "graphs"),
    [(LIBRARY, True, 1), ("/home/mine.py", True, 1), ("/home/mine.py", False, 3)],
)
def test_code_that_asks_whether_it_is_compiled_runs_as_plain_pytorch_runs_it(
    file: str, constant: bool, graphs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No input decides what some look at: it is computed, and the graph goes on."""
    fitted = assert_trains_alike(asking_in(file, constant=constant), lambda model, x: model(x))
    assert len(tightfit.report(fitted).parts or [None]) == graphs
    assert "asks whether it is compiled" not in capsys.readouterr().err


def test_what_chance_decides_is_no_constant() -> None:
    model = asking_in("/home/mine.py", constant=False, data=OF_CHANCE)
    assert_trains_alike(model, lambda model, x: model(x))


def test_a_library_that_would_end_a_graph_at_data_runs_as_compiled_which_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = asking_in(LIBRARY, constant=False)
    fitted = fitted_twin(model)
    x = torch.randn(4, 8)
    y = fitted.layer(x)
    assert torch.equal(fitted(x), fitted.layer(torch.tanh(3 * y)).sum())
    assert graphs_of(fitted) == 1
    said = capsys.readouterr().err
    assert said.count("library/masks.py:5 asks whether it is compiled") == 1


class Constants(nn.Module):
    """Its first graph needs no gradient: numbers become tensors there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scales = [torch.as_tensor(n) for n in (0.5, 0.25, 0.125)]
        torch._dynamo.graph_break()
        return self.layer(x * sum(scales))


class Doubled(torch.autograd.Function):
    """Adds to a tensor that the model keeps: no plan can."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.total = total
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None]:
        ctx.total.add_(ctx.saved_tensors[0].sum())
        return first * 2 + second * 3, None


class Totals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.total: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.total is None:
            self.total = x.new_zeros(())
        first, second = Doubled.apply(self.layer(x) * 0.5, self.total)
        return first.tanh() * 0.5 + second


@pytest.mark.parametrize("kind", [Constants, Totals])
def test_graphs_that_run_as_they_are_hold_no_more_than_plain_pytorch(kind: type[nn.Module]) -> None:
    """Neither numbers of Dynamo's examples, nor what a function of autograd has saved."""

    def lived(net: nn.Module) -> tuple[list[int], Tensor]:
        meter, left = meter_for(torch.device("cpu")), list[int]()
        x = torch.linspace(0, 1, 256 * 8).view(256, 8)
        gc.collect()
        gc.disable()
        before = meter.live_bytes()
        for _ in range(4):
            net(x).square().sum().backward()
            left.append(meter.live_bytes() - before)
        gc.enable()
        return left[2:], torch.cat([p.grad.flatten() for p in net.parameters()])  # type: ignore

    model = kind()
    plain_bytes, plain = lived(copy.deepcopy(model))
    fitted_bytes, fitted = lived(fitted_twin(model))
    assert fitted_bytes == plain_bytes
    assert torch.equal(fitted, plain)
