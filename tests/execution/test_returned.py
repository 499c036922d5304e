"""What a planned call returns and changes is as plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tightfit
from tightfit.allocator.meter import measure_peak
from tightfit.errors import TightfitError
from tightfit.torch_private import engine


class Model(nn.Module):
    """A linear layer and a buffer, for a function of both."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("state", torch.ones(8))
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def fitted(model: nn.Module) -> nn.Module:
    return tightfit.fit(model, "1GiB", costs="unit", cache=False)


def leaf() -> Tensor:
    return torch.randn(4, 8)


def trained() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


def inner() -> Tensor:
    """An input with a history: it may be changed in place."""
    return torch.randn(4, 8, requires_grad=True) * 2


def view_without_gradients(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    z = m.linear(x)
    with torch.no_grad():
        return z, z.view(2, 2, 8)


def detached(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    z = m.linear(x)
    return z.T, z.detach(), z.detach()[:2], z


def changed(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    m.state.add_(m.linear(x).sum(0))
    return m.linear(x), x


def turned(m: Model, x: Tensor) -> Tensor:
    x.t_()
    return m.linear(x.t())


def turned_and_changed(m: Model, x: Tensor) -> Tensor:
    x.t_().mul_(2)
    return m.linear(x.t())


def of_the_input(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    return x, x.view(-1), x.detach(), m.linear.weight, m.state[:2], m.linear(x.detach())


def views(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    z = m.linear(x)
    return z[:3], z[1:], z.expand(2, 4, 8), *z.unbind(0)


def one(m: Model, x: Tensor) -> Tensor:
    return m.linear(x).view(2, 2, 8)


def replaced(m: Model, x: Tensor) -> Tensor:
    y = m.linear(x) * m.state
    m.state = 0.9 * m.state + 0.1 * y.detach().abs().mean(0)
    return y.sum()


def weighted(output: Any, model: Model, x: Tensor) -> Tensor:
    """Return a loss that every output goes into, also those that no gradient goes through."""
    total = model.state.sum() + x.sum()
    for i, t in enumerate(tree_leaves(output)):
        total = total + (t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() * (i + 1)
    return total


CASES = {
    "a view made without gradients": (view_without_gradients, leaf),
    "detached aliases": (detached, leaf),
    "an input changed": (changed, leaf),
    "an input with a history changed": (changed, inner),
    "an input turned": (turned, leaf),
    "an input with a history turned": (turned, inner),
    "an input turned and changed": (turned_and_changed, leaf),
    "the input, views of it, members": (of_the_input, trained),
    "views": (views, leaf),
    "one view": (one, leaf),
    "a buffer read, then replaced": (replaced, leaf),
}


def facts_of(model: Model, output: Any, x: Tensor) -> list[Any]:
    """Return all that tells outputs, inputs and buffers apart."""
    outputs = tree_leaves(output)
    every = [*outputs, x, *model.parameters(), model.state]

    def root(t: Tensor) -> Tensor:
        return t._base if t._is_view() else t

    return [
        [(t.requires_grad, t.is_leaf, t.shape, t.stride()) for t in every],
        [[t is other for other in every] for t in outputs],
        [[root(t) is root(other) for other in every] for t in outputs],
        [t.detach().clone() for t in every],
    ]


def steps(model: Model, make: Callable[[], Tensor], change: Callable[[Any], None]) -> list[Any]:
    """Return what three steps show."""
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        model.zero_grad()
        model.state = model.state.detach()
        x = make()
        root = x if x.is_leaf else x.grad_fn.next_functions[0][0].variable
        output = model(x)
        change(output)
        found.append(facts_of(model, output, x))
        weighted(output, model, x).backward()
        found.append([p.grad for p in (*model.parameters(), root)])
        found[-1] = [g if g is None else g.clone() for g in found[-1]]
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("name", CASES)
def test_outputs_inputs_and_gradients_are_those_of_plain_pytorch(name: str) -> None:
    function, make = CASES[name]
    torch.manual_seed(0)
    model = Model(function)
    plain = copy.deepcopy(model)
    expected = steps(plain, make, lambda output: None)
    assert same(steps(fitted(model), make, lambda output: None), expected)


@pytest.mark.parametrize("at", [None, (slice(None), 0)], ids=["all of it", "a part"])
def test_the_caller_may_write_into_an_output(at: Any) -> None:
    torch.manual_seed(0)
    model = Model(one)
    plain = copy.deepcopy(model)

    def write(output: Tensor) -> None:
        output[... if at is None else at] *= 0.5

    assert same(steps(fitted(model), leaf, write), steps(plain, leaf, write))


def test_what_backward_needs_may_not_be_written_into() -> None:
    """As in plain PyTorch, also where the output is a view of it."""
    model = fitted(Model(lambda m, x: m.linear(x).tanh().view(2, 2, 8)))
    output = model(leaf())
    output[:, 0] = 1.0
    with pytest.raises(tightfit.TightfitError, match="changed in place between forward and back"):
        output.sum().backward()


@pytest.mark.parametrize("is_trained", [False, True])
def test_inputs_that_overlap_are_changed_together(is_trained: bool) -> None:
    """Wherever they overlap: each place has a trace of its own."""
    torch.manual_seed(0)
    model = Model(lambda m, x, y: (x.mul_(2), m.linear(y))[1])
    plain = copy.deepcopy(model)
    fitted(model)
    for start in (0, 1, 2, 0):
        found = []
        for each in (model, plain):
            torch.manual_seed(start)
            each.zero_grad()
            root = torch.randn(8, 8, requires_grad=is_trained)
            memory = root * 2 if is_trained else root
            output = each(memory[start : start + 2], memory[start + 1 : start + 3])
            (output.square().sum() + memory.sum()).backward()
            found.append([output.detach(), memory.detach(), each.linear.weight.grad])
            found[-1] += [root.grad] if is_trained else []
        assert same(*found)


def test_one_of_two_inputs_that_overlap_may_get_a_history() -> None:
    torch.manual_seed(0)
    model = Model(lambda m, x, y: (x.add_(m.linear(y.clone())), y.square().sum())[1])
    plain = copy.deepcopy(model)
    fitted(model)
    for start in (0, 1, 0):
        found = []
        for each in (model, plain):
            torch.manual_seed(start)
            each.zero_grad()
            memory = torch.randn(8, 8)
            output = each(memory[start : start + 2], memory[start + 1 : start + 3])
            (output + memory.sum()).backward()
            found.append([output.detach(), memory.detach(), each.linear.weight.grad])
            found[-1].append([memory.requires_grad, memory.is_leaf])
        assert same(*found)


class Cell(nn.Module):
    """A recurrent cell that keeps its state in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.linear(x) + self.state)
        return self.linear(x).mean()


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_replaced_buffer_keeps_its_history(is_truncated: bool) -> None:
    torch.manual_seed(0)
    model = Cell()
    gradients = []
    for each in (copy.deepcopy(model), fitted(model)):
        torch.manual_seed(1)
        each.state, held = torch.zeros(4, 8), []
        for _ in range(3):
            each(torch.randn(4, 8))
            held.append(each.state)
            if is_truncated:
                each.state.square().sum().backward()
                each.state = each.state.detach()
        if not is_truncated:
            sum(state.sum() * (i + 1) for i, state in enumerate(held)).backward()
        gradients.append([each.linear.weight.grad, *(state.detach() for state in held)])
    assert same(*gradients)


@pytest.mark.parametrize("make", [leaf, trained])
def test_a_forward_with_nothing_to_train_runs_plainly(
    make: Callable[[], Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Model(lambda m, x: m.linear(x).argmax(-1) if m.counts else m.linear(x))
    model.counts = True
    plain = copy.deepcopy(model)
    fit = fitted(model)
    for _ in range(2):
        x = make()
        assert torch.equal(fit(x), plain(x))
    model.counts = plain.counts = False
    x = make()
    for each in (plain, fit):
        each(x).sum().backward()
    assert torch.equal(plain.linear.weight.grad, model.linear.weight.grad)
    assert tightfit.report(model).plan is not None


def test_views_of_what_the_plan_reads_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    """Their gradients are added up before those of the plan: the last bit may differ."""
    model = fitted(Model(lambda m, x: (lambda z: (z.T, z.square(), z))(m.linear(x))))
    weighted(model(leaf()), model, leaf()).backward()
    assert "are views of one tensor" in capsys.readouterr().err


def test_to_ask_what_a_backward_is_for_holds_no_memory() -> None:
    leaf = torch.ones(8, requires_grad=True)
    asked: list[bool] = []
    loss = (leaf * 2).sum()
    loss.backward(retain_graph=True)  # its gradient exists from now on
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(lambda _: asked.append(engine.is_differentiated_by(leaf)))
    engine.node_elsewhere.cache_clear()
    _, peak = measure_peak(lambda: loss.backward(retain_graph=True))
    assert peak.growth_bytes == 0 and asked == [False]


class Hidden(nn.Module):
    """Returns an output and the hidden values that it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).tanh()
        return self.last(hidden), hidden


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "gone"])
def test_a_hook_that_would_see_a_part_of_a_gradient_is_never_called(is_kept: bool) -> None:
    torch.manual_seed(0)
    output, hidden = fitted(Hidden())(torch.randn(4, 8))
    seen: list[torch.Tensor | None] = []
    hidden.register_hook(seen.append)
    kept = [hidden] * is_kept
    del hidden
    with pytest.raises(TightfitError, match="are computed from it"):
        output.sum().backward()
    assert not seen
    assert len(kept) == is_kept


def test_a_hook_that_sees_a_whole_gradient_is_called() -> None:
    def seen_by_hook(model: nn.Module) -> torch.Tensor:
        torch.manual_seed(1)
        seen: list[torch.Tensor] = []
        _, hidden = model(torch.randn(4, 8))
        hidden.register_hook(seen.append)
        hidden.square().sum().backward()
        return seen[0]

    torch.manual_seed(0)
    plain = Hidden()
    planned = fitted(copy.deepcopy(plain))
    for _ in range(2):
        assert torch.equal(seen_by_hook(plain), seen_by_hook(planned))
