"""Inner modules in which data decide: one op of one graph, or graph by graph, and nothing twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tightfit
from tightfit.execution.attach import attached
from tightfit.session.graphs import GraphSteps

STEPS = 7  # graphs that are others in each call run plainly from the fifth on


class Routed(nn.Module):
    """Sends each token to the expert with the best score, with noise: others in every call."""

    def __init__(self, width: int, experts: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        scores = self.gate(x)
        chosen = (scores + torch.randn_like(scores)).argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return x + y * scores.softmax(-1)[:, :1]


class Counted(Routed):
    """Counts what it has routed, and says how many it was: outside of what a plan may do twice."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.seen, self.log = 0, []

    def forward(self, x):
        positive = x[x[:, 0] > 0]
        self.seen += len(positive)
        self.log.append(float(x.detach().mean()))
        print(f"{len(positive)} of {len(x)}")
        return super().forward(x)


class Balanced(Routed):
    """Leaves a loss of its own where the model finds it."""

    def forward(self, x):
        self.balance = self.gate(x).softmax(-1).mean(0).square().sum()
        return super().forward(x)


class Averaging(Routed):
    """Notes how often each expert is asked, in a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("shares", torch.zeros(2))

    def forward(self, x):
        with torch.no_grad():
            self.shares.mul_(0.9).add_(self.gate(x).softmax(-1).mean(0))
        return super().forward(x)


class Checkpointed(nn.Module):
    """Is computed again in the backward by PyTorch, whose graph would hold the op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.routed = Routed(width)

    def forward(self, x):
        return checkpoint(self.routed, x, use_reentrant=False)


class Branching(nn.Module):
    """Takes one of two ways: a graph each, that serve again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x).tanh()


class Rows(nn.Module):
    """Returns as many rows as data say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x)[x[:, 0] > 0.1]


class Model(nn.Module):
    """Blocks in a row, each with an inner module in which data decide."""

    def __init__(self, inner: type[nn.Module], blocks: int = 3, width: int = 32) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner(width) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for inner, norm in zip(self.inner, self.norms, strict=True):
            x = norm(inner(x))
        balance = getattr(self.inner[0], "balance", 0.0)
        return self.head(x).square().mean() + balance


def trained(model: nn.Module, steps: int = STEPS) -> list[Any]:
    """Return losses and parameters, and the random numbers that follow each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    found: list[Any] = []
    for _ in range(steps):
        loss = model(torch.randn(256, 32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), torch.rand(1)]
        del loss
    return [*found, *(p.detach().clone() for p in model.parameters())]


def twins(inner: type[nn.Module], budget: Any, blocks: int = 3) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Model(inner, blocks)
    options = {"costs": "unit", "cache": False, "limits": (0.5, 0.05)}
    return plain, tightfit.fit(copy.deepcopy(plain), budget, **options)


def assert_equal(mine: list[Any], reference: list[Any]) -> None:
    assert len(mine) == len(reference)
    assert all(torch.equal(a, b) for a, b in zip(mine, reference, strict=True))


def test_experts_are_one_op_each_of_one_graph_inside_a_budget(capsys: Any) -> None:
    plain, roomy = twins(Routed, "1GiB")
    reference = trained(plain)
    assert_equal(trained(roomy), reference)
    session = attached(roomy)
    assert not session.is_in_parts and not tightfit.report(roomy).outside
    said = capsys.readouterr().err
    assert said.count("data decide sizes inside of 'inner.0', 'inner.1', 'inner.2'") == 1
    most = max(step.peak_bytes for step in session.guard.steps)
    constant = max(step.constant_bytes for step in session.guard.steps)
    budget = constant + 7 * (most - constant) // 10
    fitted = twins(Routed, budget)[1]
    assert_equal(trained(fitted), reference)
    assert not attached(fitted).is_in_parts
    assert all(step.peak_bytes <= budget for step in attached(fitted).guard.steps)


def test_a_graph_without_a_plan_runs_as_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no plan fits the budget and plain PyTorch does."""
    plain, fitted = twins(Averaging, "1GiB")
    runs = lambda _, graph, inputs: graph.run_as_it_is(*inputs)  # noqa: E731
    monkeypatch.setattr(GraphSteps, "run_graph", runs)
    assert_equal(trained(fitted), trained(plain))
    assert_equal(list(fitted.buffers()), list(plain.buffers()))


def test_what_else_a_module_does_is_done_as_often_as_in_plain_pytorch(capsys: Any) -> None:
    plain, fitted = twins(Counted, "1GiB", blocks=2)
    reference = trained(plain)
    first = capsys.readouterr().out
    assert_equal(trained(fitted), reference)
    assert capsys.readouterr().out == first
    for mine, theirs in zip(fitted.inner, plain.inner, strict=True):
        assert (mine.seen, mine.log) == (theirs.seen, theirs.log)
    assert attached(fitted).is_in_parts


@pytest.mark.parametrize("inner", [Balanced, Branching, Rows, Checkpointed])
def test_other_modules_in_which_data_decide_are_planned_graph_by_graph(
    inner: type[nn.Module],
) -> None:
    """They change what others read, serve again, return other sizes, or lie in another graph."""
    plain, fitted = twins(inner, "1GiB", blocks=2)
    assert_equal(trained(fitted), trained(plain))
    assert attached(fitted).is_in_parts


def test_one_module_that_holds_most_of_a_step_is_planned_graph_by_graph() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Routed(32), nn.Linear(32, 300), nn.Linear(300, 1))
    plain.register_module("last", nn.Flatten(0))
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    results = []
    for model in (plain, fitted):
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(256, 32)).square().mean()
            loss.backward()
            losses.append(loss.detach())
            del loss
        results.append([*losses, *(p.grad for p in model.parameters())])
    assert_equal(*results)
