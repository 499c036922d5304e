"""Programs of reports in which a budget was refused for nothing, with the budgets they name."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from api.test_decisions import plans_of
from benchmarks.training_loops import LIFETIMES, Life, Run, live
from support.lives import assert_trained_alike
from support.searches import wait_for_searches
from tightfit.errors import BudgetExceeded, InfeasibleBudget, TightfitError
from tightfit.units import parse_bytes

MIB = 1 << 20


def lived(
    loop: Callable[[Run], None], budget_bytes: int | None, steps: int = 5, **more: Any
) -> Life:
    gc.collect()
    run = Run(budget_bytes, steps=steps, small=False, **({"cache": False} | more))
    return live(loop, run)


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("gradients_cleared_late", "26.1MiB"),
        ("features_outside", "16MiB"),
        ("critic_outside", "22MiB"),
        ("calls_without_backward", "0.75MiB"),
        ("calls_without_backward", "1GiB"),
    ],
)
def test_budgets_that_plain_pytorch_keeps_to(name: str, budget: str) -> None:
    loop = LIFETIMES[name].function
    plain = lived(loop, None)
    assert plain.whole_bytes <= parse_bytes(budget)
    assert_trained_alike(plain, lived(loop, parse_bytes(budget)))


# -- a loss outside -----------------------------------------------------------------------------


def test_a_loss_outside_that_finds_no_room_names_what_helps() -> None:
    fitted = lived(LIFETIMES["features_outside"].function, 12 * MIB)
    assert "tightfit.step" in fitted.error
    assert fitted.advised_bytes is not None and fitted.advised_bytes <= 15 * MIB
    assert all(number <= 14.2 * MIB for number in proven_in(fitted.error))


def test_the_same_loss_inside_takes_less() -> None:
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def loss_of(x: Tensor) -> Tensor:
        parts = []
        for layer in net:
            x = F.relu(layer(x))
            parts.append(x[:8].square().mean())
        return torch.stack(parts).sum()

    step = tightfit.step(loss_of, modules=net, budget="12MiB", cache=False)
    for _ in range(3):
        step(torch.randn(4096, 64)).backward()


def proven_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"proven: none fits less than (\d+)", text)]


# -- workspaces that were not measured ----------------------------------------------------------


def convolutions(run: Run) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run.fit(net, optimizer=optimizer)
    for _ in range(run.steps):
        loss = net(torch.randn(4, 3, 32, 32)).square().mean()
        run.step(loss, optimizer)
    run.trained(net)


def test_a_cold_proof_holds_with_a_warm_cache(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    plain = lived(convolutions, None)
    cold = [lived(convolutions, int(share * plain.whole_bytes)) for share in (0.3, 0.45, 0.6, 0.75)]
    proven = max((n for life in cold for n in proven_in(life.error)), default=0)
    assert 0 < proven <= plain.whole_bytes
    assert not lived(convolutions, plain.whole_bytes, cache=True).error
    for share in (0.99, 0.95, 0.9):
        assert lived(convolutions, int(share * proven), cache=True).error


# -- plans that stopped far from their bound ----------------------------------------------------


class Attention(nn.Module):
    """Graph attention: each edge has a weight, normalised over the edges of its end."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.begin, self.end = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.inner(x)
        scores = F.leaky_relu((h @ self.begin)[edges[0]] + (h @ self.end)[edges[1]], 0.2)
        weights = scores.exp()
        sums = torch.zeros(len(x)).index_add(0, edges[1], weights)
        messages = h[edges[0]] * (weights / sums[edges[1]])[:, None]
        return F.elu(torch.zeros_like(h).index_add(0, edges[1], messages))


class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.register_buffer("edges", torch.randint(0, 400, (2, 3000)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.edges)
        return x


class Tied(nn.Module):
    """The same weights in several places, and hooks on the modules that have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight
            layer.register_forward_hook(lambda module, given, made: made * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.linear(x, self.embed.weight.T)


def randomised() -> nn.Module:
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.RReLU())])


class Field(nn.Module):
    """A radiance field: positions in sines, a deep network, weights along each ray."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skip = nn.Linear(39, 64), nn.Linear(39 + 64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.out = nn.Linear(64, 4)

    def forward(self, points: Tensor) -> Tensor:
        rays, samples, _ = points.shape
        waves = [f(points * 2**k) for k in range(6) for f in (torch.sin, torch.cos)]
        encoded = torch.cat([points, *waves], -1).reshape(rays * samples, -1)
        h = F.relu(self.first(encoded))
        for layer in self.layers[:2]:
            h = F.relu(layer(h))
        h = F.relu(self.skip(torch.cat([h, encoded], -1)))
        for layer in self.layers[2:]:
            h = F.relu(layer(h))
        out = self.out(h).reshape(rays, samples, 4)
        opaque = 1 - torch.exp(-F.relu(out[..., 3]) * 0.1)
        through = torch.cumprod(torch.cat([torch.ones(rays, 1), 1 - opaque + 1e-10], 1), 1)[:, :-1]
        return ((opaque * through)[..., None] * torch.sigmoid(out[..., :3])).sum(1)


def inputs_of(model: nn.Module) -> Tensor:
    if isinstance(model, Field):
        return torch.randn(64, 16, 3)
    return torch.randn(400 if isinstance(model, GraphAttention) else 512, 64)[
        :, : 32 if isinstance(model, GraphAttention | Tied) else 64
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
@pytest.mark.parametrize("make", [GraphAttention, Tied, randomised, Field])
def test_plans_are_near_their_bound_or_use_the_budget(
    make: Callable[[], nn.Module], share: float
) -> None:
    reports: list[tightfit.Report] = []

    def loop(run: Run) -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.fit(model, optimizer=optimizer)
        for _ in range(run.steps):
            loss = model(inputs_of(model)).square().mean()
            run.step(loss, optimizer)
            del loss
        run.trained(model)
        if run.budget_bytes is not None:
            reports.append(tightfit.report(model))

    plain = lived(loop, None, steps=8)
    fitted = lived(loop, int(share * plain.whole_bytes), steps=8, costs="unit")
    if share == 1.0 or not fitted.error:
        assert_trained_alike(plain, fitted)
    for report in reports:
        is_near = report.overhead <= report.bound + 0.1
        assert is_near or report.planned_peak_bytes >= 0.95 * report.budget_bytes


# -- new plans in every step --------------------------------------------------------------------


class Named(nn.Module):
    """Never reads the name that comes with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.layers(batch["x"]).square().mean()


SEEN: set[int] = set()


class Noting(Named):
    """Notes outside of itself what it was given."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        SEEN.add(batch["step"])
        return super().forward(batch)


class Scaled(Named):
    """Reads a number of Python's that comes from data."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return super().forward(batch) * batch["scale"]


class Listed(Named):
    """Makes a tensor of a list that comes from data."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.layers(batch["x"] * torch.tensor(batch["list"])).square().mean()


@pytest.mark.parametrize("make", [Named, Noting, Scaled, Listed])
def test_what_changes_in_every_step_takes_no_plan_in_every_step(
    make: type[Named], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    plain = make()
    fitted = tightfit.fit(copy.deepcopy(plain), "1MiB", costs="unit", cache=False)
    known = 0
    for step in range(14):
        batch = {
            "x": torch.randn(16, 8), "name": f"b{step}", "names": [f"b{step}"], "step": step,
            "scale": 1.0 + step / 7, "list": [float(step + i) for i in range(8)],
        }  # fmt: skip
        for model in (plain, fitted):
            model.zero_grad()
            model(batch).backward()
        for a, b in zip(plain.parameters(), fitted.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        if step == 9:
            known = plans_of(fitted)
            capsys.readouterr()
    assert plans_of(fitted) == known <= 8  # then it runs without a plan
    assert "plan" not in capsys.readouterr().err


def test_lists_of_data_leave_nothing_behind() -> None:
    torch.manual_seed(0)
    model = tightfit.fit(Listed(), "1MiB", costs="unit", cache=False)

    def alive() -> int:
        gc.collect()
        return sum(isinstance(x, torch.fx.GraphModule | Tensor) for x in gc.get_objects())

    counts = []
    for step in range(40):
        batch = {"x": torch.randn(16, 8), "list": [float(step + i) for i in range(8)]}
        model(batch).backward()
        if step % 10 == 9:
            counts.append(alive())
    assert counts[-1] == counts[-2] == counts[-3]


# -- texts --------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*LIFETIMES])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_texts_fields_and_advice_are_views_of_one_value(name: str, share: float) -> None:
    loop, refusals = LIFETIMES[name].function, []

    def noting(run: Run) -> None:
        try:
            loop(run)
        except TightfitError as error:
            refusals.append(error)
            raise

    gc.collect()
    plain = live(loop, Run(None, steps=3, small=True))
    gc.collect()
    live(noting, Run(int(share * plain.whole_bytes), steps=3, small=True, cache=False))
    for error in refusals:
        text = str(error)
        assert not re.search(r"-\d+(\.\d+)? [KM]?i?B", text)
        assert " 0.00 MiB" not in text
        if isinstance(error, InfeasibleBudget):
            assert error.minimum_bytes is not None
            assert error.minimum_bytes > error.budget_bytes
            named = re.search(r"try +(?:a budget of|more than) (\d[\d.]*) ?(\w+)", text)
            assert named is not None
            tried = parse_bytes(named[1] + named[2].replace("bytes", "B"))
            assert error.minimum_bytes <= tried <= 1.02 * error.minimum_bytes
            found = [int(n) for n in re.findall(r"a plan fits (\d+) bytes", text)]
            assert all(n <= max(found) for n in proven_in(text) if found)
            assert all(n <= error.minimum_bytes for n in found)
            if (later := re.search(r"more than this call: (\d+) bytes", text)) is not None:
                assert int(later[1]) == error.minimum_bytes
            assert error.proven == ("proven: there is none" in text)
        elif isinstance(error, BudgetExceeded):
            assert str(error.measured_bytes) in text
            assert error.measured_bytes > error.budget_bytes


# -- early words --------------------------------------------------------------------------------


def test_a_budget_below_the_parameters_is_refused_before_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tightfit.session.stages.capture", None)
    model = nn.Sequential(*[nn.TransformerEncoderLayer(128, 4, 512) for _ in range(2)])
    tightfit.fit(model, "1MiB", cache=False)
    with pytest.raises(InfeasibleBudget, match="parameters and buffers take") as refused:
        model(torch.randn(16, 4, 128))
    assert refused.value.proven and refused.value.minimum_bytes is not None


def test_what_existed_before_is_outside_of_the_limit() -> None:
    """The same in both orders, as the page on refusals says it."""
    model = nn.Linear(8, 8)
    before = torch.zeros(MIB)  # 4 MiB
    tightfit.fit(model, "1MiB", cache=False)
    model(torch.randn(4, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="no room for a further"):
        torch.zeros(MIB)
    assert len(before) == MIB
    tightfit.unfit(model)


def test_a_gradient_penalty_trains_within_what_plain_pytorch_takes() -> None:
    def loop(run: Run) -> None:
        critic = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
        optimizer = torch.optim.Adam(critic.parameters())
        run.fit(critic, optimizer=optimizer)
        for _ in range(run.steps):
            x = torch.randn(256, 64, requires_grad=True)
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = (slope.norm(2, dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.note(loss)
        run.trained(critic)

    plain = lived(loop, None)
    fitted = lived(loop, plain.whole_bytes)
    assert_trained_alike(plain, fitted)


# -- by chance ----------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return self.out(nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], True)[0])


def packed(run: Run) -> None:
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.fit(model, optimizer=optimizer)
    for step in range(run.steps):
        lengths = torch.tensor([20, 20 - step, 12, 3 + step, 7])
        loss = model(torch.randn(5, 20, 16), lengths).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(model)


def test_packed_sequences_train_within_what_plain_pytorch_takes() -> None:
    plain = lived(packed, None, steps=6)
    assert_trained_alike(plain, lived(packed, plain.whole_bytes, steps=6))


def test_a_forward_of_which_no_output_needs_a_gradient_runs() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).detach().argmax(1)

    plain = Frozen()
    fitted = tightfit.fit(copy.deepcopy(plain), "1MiB", cache=False)
    x = torch.randn(4, 8)
    assert torch.equal(plain(x), fitted(x))


def test_an_arena_names_a_budget_with_room_for_gradients_that_are_cleared_late() -> None:
    """No plan of an arena counts on it that they are freed between forward and backward."""

    def loop(run: Run) -> None:
        net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
        optimizer = torch.optim.AdamW(net.parameters())
        run.fit(net, optimizer=optimizer, costs="unit", arena=True)
        for _ in range(run.steps):
            loss = net(torch.randn(64, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.note(loss)
        run.trained(net)

    refused = lived(loop, 475 << 10, steps=3)
    assert len(refused.losses) == 1  # gradients exist from the second step on
    assert refused.advised_bytes is not None and refused.advised_bytes > 475 << 10
    assert lived(loop, refused.advised_bytes, steps=3).error == ""


def overhead_of(clear: str, budget_bytes: int) -> float:
    """Train by a loop that clears gradients at some moment; return the overhead of its plan."""
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(128, 128), nn.GELU())])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    tightfit.fit(net, budget_bytes, optimizer=optimizer, costs="flops", cache=False)
    for _ in range(5):
        wait_for_searches(net)
        loss = net(torch.randn(512, 128)).square().mean()
        if clear == "before the backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if clear == "after the step":
            optimizer.zero_grad()
    found = tightfit.report(net)
    assert found is not None and found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= budget_bytes
    tightfit.unfit(net)
    return found.overhead


def test_gradients_that_are_cleared_before_the_backward_take_no_room_in_it() -> None:
    """They exist in the forward only, which has room for them while little is kept."""
    budget_bytes = 9 << 19
    late = overhead_of("before the backward", budget_bytes)
    assert late <= 1.05 * overhead_of("after the step", budget_bytes)
