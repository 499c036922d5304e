"""State that a forward leaves for the next call is an input and an output of its plan."""

from __future__ import annotations

import collections
import copy
import functools
import types

import pytest
import torch
from torch import nn

import tightfit
from tightfit.capture.capture import capture
from tightfit.execution.attach import attached
from tightfit.session import stages

COUNT = 0


class Hidden(nn.Module):
    """Truncated back-propagation through time."""

    def __init__(self):
        super().__init__()
        self.cell, self.hidden = nn.RNNCell(8, 8), None

    def forward(self, x):
        h = x.new_zeros(len(x), 8) if self.hidden is None else self.hidden
        h = self.cell(x, h)
        self.hidden = h.detach()
        return h.sum()


class Pair(nn.Module):
    """The same, with a state of two tensors."""

    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.LSTMCell(8, 8), None

    def forward(self, x):
        state = (x.new_zeros(len(x), 8),) * 2 if self.state is None else self.state
        h, c = self.cell(x, state)
        self.state = h.detach(), c.detach()
        return h.sum()


class Segments(nn.Module):
    """A memory of the segment before for every layer, as in Transformer-XL."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))
        self.memory = [torch.zeros(4, 8) for _ in range(2)]

    def forward(self, x):
        kept = []
        for layer, before in zip(self.layers, self.memory, strict=True):
            kept.append(x.detach())
            x = layer(torch.cat([x, before], 1)).tanh()
        self.memory = kept
        return x.sum()


class Recent(nn.Module):
    """The last two of what it computed."""

    def __init__(self):
        super().__init__()
        self.linear, self.memory = nn.Linear(8, 8), collections.deque(maxlen=2)

    def forward(self, x):
        h = sum(self.memory, self.linear(x))
        self.memory.append(h.detach())
        return h.tanh().sum()


class InList(nn.Module):
    """In a list, from nothing on."""

    def __init__(self):
        super().__init__()
        self.linear, self.memory = nn.Linear(8, 8), [None]

    def forward(self, x):
        h = self.linear(x)
        if self.memory[0] is not None:
            h = h + self.memory[0]
        self.memory[0] = h.detach()
        return h.tanh().sum()


class Leaving(nn.Module):
    """Leaves what it computed to be looked at."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), None

    def forward(self, x):
        self.last = self.linear(x)
        return self.last.tanh().sum()


OPTIONS = {"costs": "unit", "planner": "greedy", "cache": False}


@pytest.mark.parametrize("kind, captures", [(Hidden, 2), (Pair, 2), (Segments, 1), (Recent, 3)])
def test_what_is_carried_is_an_input_and_an_output(kind, captures) -> None:
    compare(kind, captures)


def test_items_of_containers_are_carried_too() -> None:
    compare(InList, 2)


def test_where_something_was_left_before_a_further_shape_is_traced_once(monkeypatch) -> None:
    traces = []
    monkeypatch.setattr(
        stages, "capture", lambda *given, **named: traces.append(0) or capture(*given, **named)
    )
    model = tightfit.fit(Leaving(), "1GiB", **OPTIONS)
    model(torch.randn(4, 8)).backward()
    del traces[:]
    model(x := torch.randn(5, 8)).backward()
    assert len(traces) == 1
    assert torch.equal(model.last, model.linear(x))


def compare(kind, captures) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", **OPTIONS)
    for _ in range(6):
        x = torch.randn(4, 8)
        for each in (plain, model):
            each.zero_grad()
        losses = [each(x) for each in (plain, model)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert len(attached(model).specialisations) == captures


class CountsInObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), types.SimpleNamespace(calls=1)

    def forward(self, x):
        self.seen.calls += 1
        return (self.linear(x) * self.seen.calls).sum()


class CountsInGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return (self.linear(x) * COUNT).sum()


class LeavesInObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), types.SimpleNamespace(last=torch.zeros(4, 8))

    def forward(self, x):
        h = self.linear(x) + self.seen.last
        self.seen.last = h.detach()
        return h.sum()


@pytest.mark.parametrize("kind", [CountsInObject, CountsInGlobal, LeavesInObject])
def test_other_state_is_carried_too(kind) -> None:
    global COUNT  # noqa: PLW0603
    torch.manual_seed(0)
    plain = kind()
    found = []
    for model in (plain, tightfit.fit(copy.deepcopy(plain), "1GiB", **OPTIONS)):
        torch.manual_seed(1)
        COUNT = 0
        for _ in range(4):
            model(torch.randn(4, 8)).backward()
        seen = str(vars(getattr(model, "seen", types.SimpleNamespace())))
        found.append((COUNT, seen, [p.grad.tolist() for p in model.parameters()]))
    assert found[0] == found[1]


class Applies(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, function, scale=None):
        return (function(self.linear(x)) * (scale() if scale else 1)).sum()


def test_functions_among_the_arguments_are_told_apart() -> None:
    plain = Applies()
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", **OPTIONS)
    factor = [2.0]
    functions = (torch.tanh, torch.relu, functools.partial(torch.add, other=1.0), torch.tanh)
    for function in functions:
        for number in (2.0, 3.0):
            factor[0] = number
            x = torch.randn(4, 8)
            assert torch.equal(
                model(x, function, lambda: factor[0]), plain(x, function, lambda: factor[0])
            )


def test_an_argument_that_is_a_function_is_planned_once() -> None:
    model = tightfit.fit(Applies(), "1GiB", **OPTIONS)
    for _ in range(3):
        model(torch.randn(4, 8), torch.tanh).backward()
    assert len(attached(model).specialisations) == 1
