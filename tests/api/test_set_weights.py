"""Weights that are computed in every forward: old norms, pruning, parametrizations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import tightfit

pytestmark = [
    pytest.mark.filterwarnings("ignore:hooks on module"),
    pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning"),
]


def pruned(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", 0.3)
    prune.random_structured(layer, "weight", 0.3, dim=0)
    prune.random_unstructured(layer, "bias", 0.2)
    return layer


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral norm": spectral_norm,
    "spectral norm, 3 iterations": lambda layer: spectral_norm(layer, n_power_iterations=3),
    "weight norm": weight_norm,
    "weight norm of the whole": lambda layer: weight_norm(layer, dim=None),
    "pruning": pruned,
    "parametrized spectral norm": parametrizations.spectral_norm,
    "parametrized weight norm": parametrizations.weight_norm,
}


def make(way: str) -> nn.Module:
    torch.manual_seed(0)
    norm = WAYS[way]
    first, second, head = norm(nn.Conv1d(4, 6, 3)), norm(nn.Linear(6, 8)), nn.Linear(8, 3)
    return nn.Sequential(first, nn.Tanh(), second, nn.Dropout(0.1), head)


def training(model: nn.Module, after: Callable[[int], Any] = lambda _: None) -> Iterator[Tensor]:
    """Train for four steps; yield losses, gradients, weights and everything that is stored."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4, 8)).square().mean()
        loss.backward()
        yield loss.detach().clone()
        for module in (model[0], model[2]):
            yield module.weight.detach().clone()
        for parameter in model.parameters():
            assert parameter.grad is not None
            yield parameter.grad.clone()
        optimizer.step()
        for tensor in model.state_dict().values():
            yield tensor.clone()
        after(step)


def assert_same(plain: Iterator[Tensor], fitted: Iterator[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(list(plain), list(fitted), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_every_bit_of_four_steps(way: str) -> None:
    fitted = tightfit.fit(make(way), "1GiB", costs="unit", cache=False)
    assert_same(training(make(way)), training(fitted))


@pytest.mark.parametrize("way", ["spectral norm", "pruning"])
def test_evaluation_between_and_other_weights_pruned_later(way: str) -> None:
    def between(model: nn.Module) -> Callable[[int], Any]:
        def after(step: int) -> None:
            model.eval()
            with torch.no_grad():
                model(torch.randn(2, 4, 8))
            model(torch.randn(5, 4, 8)).sum().backward()
            model.train()
            if step == 1:
                prune.random_unstructured(model[4], "weight", 0.5)
            if step == 2:
                prune.remove(model[4], "weight")

        return after

    plain = make(way)
    fitted = tightfit.fit(make(way), "1GiB", costs="unit", cache=False)
    assert_same(training(plain, between(plain)), training(fitted, between(fitted)))


def test_a_penalty_on_the_weight_that_the_forward_has_set() -> None:
    results = []
    for fit in (lambda m: m, lambda m: tightfit.fit(m, "1GiB", costs="unit", cache=False)):
        model = fit(make("spectral norm"))
        torch.manual_seed(1)
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.randn(5, 4, 8)).square().mean() + model[0].weight.square().sum()
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("norm", [spectral_norm, weight_norm])
def test_the_outermost_module_may_set_its_weight_outside_of_its_forward(norm: Any) -> None:
    results: list[Any] = []
    for fit in (lambda m: m, lambda m: tightfit.fit(m, "1GiB", costs="unit", cache=False)):
        torch.manual_seed(0)
        model = fit(norm(nn.Linear(8, 8)))
        for _ in range(3):
            model(torch.randn(4, 8)).square().sum().backward()
        results.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_parametrizations_may_be_cached_around_the_call() -> None:
    results: list[Any] = []
    for fit in (lambda m: m, lambda m: tightfit.fit(m, "1GiB", costs="unit", cache=False)):
        model = fit(make("parametrized spectral norm"))
        torch.manual_seed(1)
        for _ in range(3):
            with parametrize.cached():
                x = torch.randn(5, 4, 8)
                (model(x).square().sum() + model(x + 1).sum()).backward()
            model(x).sum().backward()
        results.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
