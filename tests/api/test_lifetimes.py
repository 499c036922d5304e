"""Nothing depends on when garbage is collected: what is let go of neither counts nor remains."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import NothingToTrain


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Twice(nn.Module):
    """Uses its weights twice: their gradients are sums."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(self.inner(x).tanh())


def fitted(model: nn.Module, budget="1GiB") -> nn.Module:
    return tightfit.fit(model, budget, costs="unit")


def step(model: nn.Module, width: int = 8) -> None:
    model(torch.randn(4, width)).square().sum().backward()


def test_a_forward_that_is_let_go_of_awaits_no_backward() -> None:
    model = fitted(Twice())
    for _ in range(3):
        model(torch.randn(4, 8))
    step(model)
    assert not model.inner.weight._backward_hooks


def test_a_model_that_is_let_go_of_is_not_fitted() -> None:
    inner = Twice()
    step(fitted(nn.Sequential(inner, nn.Linear(8, 2))))
    step(fitted(inner))
    other = Twice()
    fitted(nn.Sequential(other))  # never called
    step(other)


class Carrying(nn.Module):
    """Keeps what it computes, with its history, for its next call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x):
        self.state = (self.inner(x) + self.state).tanh()
        return self.state


class LooksAtData(nn.Module):
    """Dynamo ends a graph by an error where data become a number, in code that it follows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        z = self.inner(x)
        return z * mean_of(z)


def mean_of(z: torch.Tensor) -> float:
    with unchanged():  # this function is not followed then
        return float(z.detach().mean())


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    yield


def test_code_that_cannot_be_followed_keeps_no_inputs() -> None:
    model = fitted(LooksAtData())
    for _ in range(2):
        x = torch.randn(4, 8)
        left = weakref.ref(x)
        model(x).square().sum().backward()
        del x
        assert left() is None


def test_a_model_that_keeps_the_history_of_a_call_can_be_let_go_of() -> None:
    model = fitted(Carrying())
    step(model)
    model(torch.randn(4, 8))
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None


def test_a_loss_outlives_its_model() -> None:
    model = fitted(Twice())
    loss, weight = model(torch.randn(4, 8)).square().sum(), model.inner.weight
    del model
    gc.collect()
    loss.backward()
    assert weight.grad is not None


def test_a_shared_budget_counts_who_can_use_it() -> None:
    budget = tightfit.Budget("1GiB")
    step(fitted(Twice(), budget))
    with pytest.raises(NothingToTrain):
        tightfit.fit(nn.Sequential(nn.ReLU()), budget, shapes=[torch.ones(2)])
    model = fitted(Twice(), budget)
    assert [member.modules["model"] for member in budget.members()] == [model]


@pytest.mark.parametrize("width", range(21, 24))  # each is traced: none was seen before
def test_two_threads_learn_their_plans_at_once(width: int) -> None:
    failed: list[Exception] = []

    def train(model: nn.Module) -> None:
        try:
            for _ in range(3):
                step(model, width)
        except Exception as error:
            failed.append(error)

    models = [tightfit.fit(Twice(width), "1GiB", costs="unit", cache=False) for _ in range(2)]
    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl  # what a trace replaces is put back
