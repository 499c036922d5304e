"""A weight with several readers gets the very gradient of plain PyTorch, whatever it is called."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tightfit

ROWS, WIDTH = 20, 16

READERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "embedding": lambda w, x, i: F.embedding(i, w),
    "linear": lambda w, x, i: F.linear(F.linear(x, w), w.t()),
    "first rows": lambda w, x, i: F.linear(F.linear(x, w[:7]), w[:7].t()),
    "last rows": lambda w, x, i: F.linear(x, w[4:]) @ w[4:],
    "transposed": lambda w, x, i: (x @ w.t()) @ w,
    "expanded": lambda w, x, i: (x[:, None, :] * w.expand(len(x), -1, -1)).sum(1),
    "multiplied": lambda w, x, i: (w @ x.t()).t() @ w,
    "columns": lambda w, x, i: F.pad(x[:, :5] @ w[:, 3:8].t() @ w[:, :9], (0, WIDTH - 9)),
    "summed": lambda w, x, i: x * w.sum(0),
    "flat": lambda w, x, i: x * w.view(-1)[: x.numel()].view_as(x),
}


class Reader(nn.Module):
    """Reads its weight in one way."""

    def __init__(self, kind: str, weight: nn.Parameter) -> None:
        super().__init__()
        self.kind = kind
        self.weight = weight

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return READERS[self.kind](self.weight, x, i)


class Several(nn.Module):
    """One weight, read in several ways under several names.

    Parameters
    ----------
    names : int
        1: one parameter of one module; 2: two of it by turns; 3: each reader is a module.
    """

    def __init__(self, kinds: Sequence[str], names: int) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(ROWS, WIDTH) / 4)
        self.kinds, self.names = kinds, names
        if names == 3:
            self.readers = nn.ModuleList(Reader(kind, weight) for kind in kinds)
        else:
            for number in range(names):
                self.register_parameter(f"weight{number}", weight)

    def read(self, number: int, x: Tensor, i: Tensor) -> Tensor:
        if self.names == 3:
            return self.readers[number](x, i)
        weight = getattr(self, f"weight{number % self.names}")
        return READERS[self.kinds[number]](weight, x, i)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        for number in range(len(self.kinds)):
            x = x + torch.tanh(self.read(number, x, i))
        return x.square().mean()


class Together(nn.Module):
    """Models with a weight each, in one graph: as many cases for the price of one trace."""

    def __init__(self, models: Sequence[Several]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return torch.stack([model(x, i) for model in self.models]).sum()


def gradients(model: nn.Module, casts: bool) -> list[Tensor]:
    torch.manual_seed(1)
    x, i = torch.randn(8, WIDTH), torch.randint(0, ROWS, (8,))
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        loss = model(x, i)
    loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def assert_equal(models: Sequence[Several], casts: bool = False) -> None:
    model = Together(models)
    expected = gradients(copy.deepcopy(model), casts)
    fitted = tightfit.fit(model, "1GiB", costs="unit", cache=False)
    found = gradients(fitted, casts)
    assert len(found) == len(expected) == len(models)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("names", [1, 2, 3])
def test_the_issues_weight_in_four_ways(names: int) -> None:
    assert_equal([Several(["embedding", "first rows", "last rows", "transposed"], names)])


@pytest.mark.parametrize("names, casts", [(2, False), (3, True)], ids=["float", "autocast"])
def test_every_pair_of_readers_and_each_reader_three_times(names: int, casts: bool) -> None:
    torch.manual_seed(0)
    ways = list(READERS)
    pairs = list(itertools.pairwise([*ways, ways[0]]))
    assert_equal([Several([first, second, first], names) for first, second in pairs], casts)


def some(most: int) -> st.SearchStrategy[tuple[list[str], int]]:
    """Readers of one weight, and the number of its names."""
    kinds = st.lists(st.sampled_from(sorted(READERS)), min_size=2, max_size=most)
    return st.tuples(kinds, st.sampled_from([1, 2, 3]))


@settings(max_examples=8, derandomize=True)
@given(st.lists(some(7), min_size=2, max_size=4), st.booleans())
def test_any_number_and_kind_of_readers(several: list[tuple[list[str], int]], casts: bool) -> None:
    torch.manual_seed(0)
    assert_equal([Several(kinds, names) for kinds, names in several], casts)


class Offset(nn.Module):
    """Adds to its weight before it is read twice: autograd adds up there, and hands on one term."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.readers = nn.ModuleList(Reader("transposed", self.weight) for _ in range(2))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        weight = self.weight + 1
        x = torch.tanh(torch.tanh(x @ weight) @ weight)
        for reader in self.readers:
            x = torch.tanh(reader(x, i))
        return x.square().mean()


def of_several_calls(model: nn.Module, calls: int) -> list[Tensor | None]:
    """Return the gradients of the sum of the losses of several calls, some on one made input."""
    torch.manual_seed(2)
    source = torch.randn(8, WIDTH, requires_grad=True)
    x, i = source * 2, torch.randint(0, ROWS, (calls, 8))
    losses = [model(x if number else torch.randn(8, WIDTH), i[number]) for number in range(calls)]
    torch.stack(losses).sum().backward()
    return [source.grad, *(p.grad for p in model.parameters())]


def assert_equal_in_several_calls(model: nn.Module, calls: int, budget: str = "1GiB") -> None:
    expected = of_several_calls(copy.deepcopy(model), calls)
    found = of_several_calls(tightfit.fit(model, budget, costs="unit", cache=False), calls)
    for a, b in zip(expected, found, strict=True):
        assert a is None or (b is not None and torch.equal(a, b) and a.stride() == b.stride())


def test_terms_of_several_calls_are_added_up_one_by_one() -> None:
    torch.manual_seed(0)
    models = [Several([kind, "transposed", kind], 1) for kind in READERS]
    assert_equal_in_several_calls(Together(models), 3)


@pytest.mark.parametrize("calls", [2, 4])
def test_a_sum_of_autograds_own_is_one_term(calls: int) -> None:
    torch.manual_seed(0)
    assert_equal_in_several_calls(Offset(), calls)


@settings(max_examples=5, derandomize=True)
@given(st.lists(some(5), min_size=2, max_size=4), st.integers(2, 4))
def test_any_readers_in_any_number_of_calls(
    several: list[tuple[list[str], int]], calls: int
) -> None:
    torch.manual_seed(0)
    assert_equal_in_several_calls(
        Together([Several(kinds, names) for kinds, names in several]), calls
    )


def test_models_that_share_a_weight_add_to_one_sum() -> None:
    torch.manual_seed(0)
    both = [Several(["linear", "transposed"], 1) for _ in range(2)]
    both[1].weight0 = both[0].weight0
    plain = copy.deepcopy(both)
    fitted = [tightfit.fit(model, "1GiB", costs="unit", cache=False) for model in both]
    x, i = torch.randn(8, WIDTH), torch.randint(0, ROWS, (8,))
    for models in (plain, fitted):
        torch.stack([model(x + number, i) for number, model in enumerate(models)]).sum().backward()
    assert torch.equal(plain[0].weight0.grad, fitted[0].weight0.grad)


def test_gradients_that_are_asked_for_are_sums_of_one_backward_each() -> None:
    torch.manual_seed(0)
    model = Several(["linear", "transposed", "summed"], 1)
    plain, fitted = copy.deepcopy(model), tightfit.fit(model, "1GiB", costs="unit", cache=False)
    x, i = torch.randn(8, WIDTH), torch.randint(0, ROWS, (8,))
    found = []
    for each in (plain, fitted):
        losses = [each(x + number, i) for number in range(3)]
        first = torch.autograd.grad(losses[2], each.weight0)
        found.append([*first, *torch.autograd.grad(losses[0] + losses[1], each.weight0)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, a: Tensor, b: Tensor, c: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(a @ self.weight) @ b
        return (torch.sin(x * a + c["c"]) @ (b + a) * self.weight).sum()


@pytest.mark.parametrize("own", [False, True], ids=["one input thrice", "the weight itself"])
def test_one_tensor_as_several_inputs(own: bool) -> None:
    torch.manual_seed(0)
    model = Inputs()
    given = torch.randn(6, 6)
    found = []
    for each in (copy.deepcopy(model), tightfit.fit(model, "1GiB", costs="unit", cache=False)):
        x = each.weight if own else given.clone().requires_grad_()
        each(x, x, {"c": x}).backward()
        assert x.grad is not None and each.weight.grad is not None
        found.append([x.grad, each.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class TwoNames(nn.Module):
    """One buffer under two names, written under both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("shift", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        y = self.layer(x - self.shift)
        self.shift.add_(1)
        return (y * self.mean).square().sum()


def test_a_buffer_written_under_two_names_is_written_twice() -> None:
    torch.manual_seed(0)
    model = TwoNames()
    found = []
    for each in (copy.deepcopy(model), tightfit.fit(model, "1GiB", costs="unit", cache=False)):
        torch.manual_seed(1)
        for _ in range(3):
            each(torch.randn(5, 4)).backward()
        assert each.mean is each.shift
        found.append([each.mean, each.layer.weight.grad, each.layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
