"""Callables of several graphs whose Python goes on otherwise in every call."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from benchmarks.training_loops import Life, Run, live
from tightfit.execution.attach import attached
from tightfit.session.parts import planning

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")


class Counting(nn.Module):
    """Counts what it has seen, and logs a number of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.log = 0, []
        layers = (nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(6))
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 4)

    def forward(self, x):
        self.seen += len(x)
        x = self.body(x)
        self.log.append(float(x.mean()))
        return self.head(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del loss
    return losses + [t.detach().clone() for t in model.state_dict().values()]


def test_a_model_that_counts_and_logs_trains_in_an_arena() -> None:
    torch.manual_seed(0)
    plain, model = Counting(), Counting()
    model.load_state_dict(plain.state_dict())
    reference = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tightfit.fit(model, "2GiB", optimizer=optimizer, costs="unit", cache=False, arena=True)
    trained = train(model, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(trained, reference, strict=True))


def test_a_model_that_counts_and_logs_keeps_to_its_budget_and_finds_a_good_plan() -> None:
    torch.manual_seed(0)
    plain, model = Counting(), Counting()
    model.load_state_dict(plain.state_dict())
    reference = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 8)
    roomy = copy.deepcopy(model)
    tightfit.fit(roomy, "1GiB", costs="unit", cache=False)
    train(roomy, torch.optim.SGD(roomy.parameters(), lr=0.1), 3)
    most = attached(roomy).close_step().peak_bytes
    tightfit.unfit(roomy)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tightfit.fit(model, 6 * most // 10, optimizer=optimizer, costs="unit", cache=False)
    trained = train(model, optimizer, 8)
    assert all(torch.equal(a, b) for a, b in zip(trained, reference, strict=True))
    assert (model.seen, model.log) == (plain.seen, plain.log)
    report = tightfit.report(model)
    steps = attached(model).guard.steps
    assert len(steps) == 8
    assert all(step.peak_bytes <= 6 * most // 10 for step in steps)
    assert report.overhead < 0.5


def test_a_search_for_the_parts_of_a_model_does_not_keep_it_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, searched, choose = threading.Event(), threading.Event(), planning.choose

    def waiting(*args: Any, apart: bool = False) -> Any:
        if apart:
            searched.set()
            may_end.wait()
            return None
        return choose(*args)

    monkeypatch.setattr(planning, "choose", waiting)
    monkeypatch.setattr(planning, "_WORTH_A_SEARCH", -1.0)
    model = tightfit.fit(Counting(), "1GiB", costs="unit", cache=False)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    assert searched.wait(60)
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None
    may_end.set()


class Contrast(nn.Module):
    """Reads a queue of keys, into which keys are written before the backward: momentum contrast."""

    def __init__(self, writes_itself: bool) -> None:
        super().__init__()
        self.writes_itself = writes_itself
        self.inner = nn.Linear(16, 32)
        self.register_buffer("queue", torch.randn(32, 64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        place = int(self.place)
        self.queue[:, place : place + len(keys)] = keys.T
        self.place[0] = (place + len(keys)) % 64

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query = torch.tanh(self.inner(x))
        scores = query @ self.queue.clone().detach()
        if self.writes_itself:
            self.enqueue(query.detach())
        return scores, query.detach()


@pytest.mark.parametrize("share", [1.0, 2.0])
@pytest.mark.parametrize("is_shared", [False, True], ids=["own budget", "shared budget"])
@pytest.mark.parametrize("writes_itself", [True, False], ids=["forward writes", "loop writes"])
def test_a_buffer_that_changes_before_the_backward_is_copied(
    writes_itself: bool, is_shared: bool, share: float
) -> None:
    def loop(run: Run) -> None:
        model = Contrast(writes_itself)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.fit(model, run.budget() if is_shared else None, optimizer=optimizer)
        for _ in range(run.steps):
            scores, keys = model(torch.randn(16, 16))
            if not writes_itself:
                model.enqueue(keys)
            loss = scores.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.note(loss)
            del loss, scores, keys
        run.trained(model)

    plain = live(loop, Run(None, steps=6, small=True))
    fitted = live(loop, Run(int(share * plain.whole_bytes), steps=6, small=True, cache=False))
    assert not fitted.error
    assert (fitted.losses, fitted.parameters) == (plain.losses, plain.parameters)
    assert fitted.largest_bytes <= (fitted.budget_bytes or 0)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(x)


def test_inputs_from_before_fit_are_outside_of_the_limit() -> None:
    data = torch.randn(4096, 64)  # twice the budget
    model = Broken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tightfit.fit(model, "500KiB", optimizer=optimizer, cache=False)
    for _ in range(3):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = tightfit.report(model).measured_peak_bytes
    assert measured is not None and measured <= 500 * 2**10


def noted_step(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, samples: int
) -> torch.Tensor:
    loss = model(torch.randn(samples, 64)).square().mean()
    run.step(loss, optimizer)
    return loss.detach()


class Carrying(nn.Module):
    """Takes most of its memory between two graphs, and lets go of what it carries before that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 4)
        self.carried: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).tanh()
        self.work()
        return self.b(x)

    @torch.compiler.disable
    def work(self) -> None:
        self.carried = None
        torch.ones(1 << 20).sum()


def test_a_step_foreseen_a_little_above_its_budget_runs_within_it_and_is_measured_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is carried into a step is foreseen to stay."""

    def loop(run: Run) -> None:
        model = Carrying()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.fit(model, None, optimizer=optimizer)
        for step in range(run.steps):
            model.carried = torch.zeros(2048) if step else None
            noted_step(run, model, optimizer, samples=256)
        run.trained(model)

    plain = live(loop, Run(None, steps=5, small=True))
    fitted = live(loop, Run(plain.whole_bytes, steps=5, small=True, cache=False))
    assert not fitted.error
    assert "more than the budget. The step runs by them" in capsys.readouterr().err
    assert (fitted.losses, fitted.parameters) == (plain.losses, plain.parameters)
    assert fitted.largest_bytes <= (fitted.budget_bytes or 0)


def first_advice_works(
    loop: Callable[[Run], None], *, steps: int, share: float
) -> tuple[Life, Life]:
    """Assert that the budget trains that is advised in a share of plain PyTorch's; return both."""

    def within(budget_bytes: int | None) -> Life:
        gc.collect()
        return live(loop, Run(budget_bytes, steps=steps, small=True, cache=False))

    plain = within(None)
    refused = within(int(plain.whole_bytes * share))
    assert refused.advised_bytes is not None
    fitted = within(refused.advised_bytes)
    assert not fitted.error
    assert (fitted.losses, fitted.parameters) == (plain.losses, plain.parameters)
    return plain, refused


class PartlyEager(nn.Module):
    """A layer that keeps most of its memory for the backward outside of any graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.kept(self.a(x).tanh()))

    @torch.compiler.disable
    def kept(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().tanh().tanh()


def test_the_first_budget_that_is_advised_has_room_for_layers_that_have_not_run_yet() -> None:
    """It has room for the numbers that a loop keeps of each step, too."""

    def loop(run: Run) -> None:
        model = nn.Sequential(*(PartlyEager() for _ in range(5)), nn.Linear(64, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.fit(model, None, optimizer=optimizer)
        kept = []
        for _ in range(run.steps):
            kept.append(noted_step(run, model, optimizer, samples=512))
        run.trained(model)

    plain, refused = first_advice_works(loop, steps=6, share=0.6)
    assert (refused.advised_bytes or 0) <= 1.1 * plain.whole_bytes


def test_the_advice_of_an_optimizers_step_has_room_for_the_next_call() -> None:
    """That call begins with the state that the step makes, and with gradients yet to be cleared."""

    def loop(run: Run) -> None:
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.fit(model, optimizer=optimizer)
        for _ in range(run.steps):
            loss = model(torch.randn(16, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.note(loss)
        run.trained(model)

    plain, refused = first_advice_works(loop, steps=4, share=0.7)
    assert "the step of SGD" in refused.error
    assert (refused.advised_bytes or 0) <= plain.whole_bytes
