"""Modules that share the code of their forward: what Dynamo does with one decides for no other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import skip_code

import tightfit
from api.test_bitwise import assert_equal
from support.wrapped import Wrapped
from tightfit.torch_private import dynamo as private
from tightfit.torch_private.releases import CAUGHT_ERRORS

BREAK = "the code where Dynamo ends a graph"
STEPS = 6  # more than the calls after which Dynamo's errors are final


def planned(self: Wrapped, h: Tensor) -> Tensor:
    return self.b(h.tanh())


def branches(self: Wrapped, h: Tensor) -> Tensor:
    return self.b(h) if h.sum() > 0 else self.b(h).tanh()


def writes_numbers(self: Wrapped, h: Tensor) -> Tensor:
    return self.b(h * float(h.detach().mean()))


def differentiates(self: Wrapped, h: Tensor) -> Tensor:
    return torch.autograd.grad(self.b(h).square().sum(), h, create_graph=True)[0]


def catches(self: Wrapped, h: Tensor) -> Tensor:
    try:
        return self.b(h) @ torch.ones(3)
    except RuntimeError:
        return self.b(h)


FUNCTIONS = planned, branches, writes_numbers, differentiates


def trained(model: nn.Module, marks: Callable[[], None] = lambda: None) -> list[Tensor | None]:
    """Return the outputs and the gradients of some steps; before each of them code is marked."""
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor | None] = []
    for _ in range(STEPS):
        marks()
        output = model(torch.randn(4, 8, generator=generator))
        output.sum().backward()
        found += [output.detach().clone(), *(p.grad for p in model.parameters())]
        model.zero_grad()
    return found


def fitted_and_plain(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return tightfit.fit(models[0], "1GiB", costs="unit"), models[1]


def outside(make: Callable[[], nn.Module], marks: Callable[[], None] = lambda: None) -> set[str]:
    """Return what runs outside of plans: no parameter's gradient does, and the bits are right."""
    fitted, plain = fitted_and_plain(make)
    assert_equal(trained(fitted, marks), trained(plain))
    found = tightfit.report(fitted).outside
    assert not [name for name, why in found.items() if "no plan has made" in why]
    return set(found)


def outside_of(function: Callable[..., Tensor]) -> set[str]:
    return outside(lambda: Wrapped(function))


def test_models_of_one_class_are_reported_as_each_is_alone() -> None:
    """Whichever of them came before: all of them do, in one order and in the other."""
    alone = {}
    for function in FUNCTIONS:
        torch._dynamo.reset()
        alone[function] = outside_of(function)
    torch._dynamo.reset()
    for function in (*FUNCTIONS, *reversed(FUNCTIONS)):
        assert outside_of(function) == alone[function], function.__name__
    assert not alone[planned] and BREAK in alone[branches]


class Behind(nn.Sequential):
    """Modules that Python calls one by one."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            torch._dynamo.graph_break()
            x = module(x)
        return x


@pytest.mark.parametrize("kinds", [*itertools.permutations((planned, branches, catches))])
def test_modules_of_one_model_are_reported_one_by_one(kinds) -> None:
    """What is done with the first decides for no other."""
    found = outside(lambda: Behind(*map(Wrapped, kinds)))
    eager = set() if CAUGHT_ERRORS.is_available else {f"module '{kinds.index(catches)}'"}
    assert BREAK in found
    assert {name for name in found if name.startswith("module")} == eager


class MyLinear(nn.Linear):
    """A layer of PyTorch's by another name."""


class Calling(nn.Linear):
    """A layer that calls PyTorch's forward, as one graph breaks."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("kind", [MyLinear, Calling])
def test_forwards_of_pytorch_are_planned_behind_breaks(kind) -> None:
    """So they are where a class inherits them, or calls them."""
    outside(lambda: Behind(kind(8, 8), nn.Linear(8, 8), nn.Sequential(kind(8, 8))))
    outside(lambda: Behind(nn.Linear(8, 8)))


@pytest.mark.parametrize("often", [False, True])
def test_marks_of_others_do_not_matter(often) -> None:
    """As those that `torch.compile` makes, for all of a process."""
    alone = outside(lambda: Behind(Wrapped(branches), nn.Linear(8, 8)))
    calls = itertools.count()

    def marks() -> None:
        if often or next(calls) == 0:
            skip_code(Wrapped.forward.__code__)
            skip_code(nn.Linear.forward.__code__)

    torch._dynamo.reset()
    assert outside(lambda: Behind(Wrapped(branches), nn.Linear(8, 8)), marks) == alone


def test_a_module_of_ever_new_graphs_decides_for_no_other_of_its_class() -> None:
    def changes(self: Wrapped, h: Tensor) -> Tensor:
        return self.b(h) + len(self.text)

    runs: list[int] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            runs[-1] += 1
            return graph.forward(*inputs)

        return run

    first, second = Wrapped(changes), Wrapped(planned)
    follower = Numbered()
    run = private.compiled(Behind(first, second), backend, follower)
    for step in range(2 * STEPS):
        vars(first)["text"] = "x" * step
        follower.number = step
        runs.append(0)
        run(torch.ones(4, 8))
    assert first in follower.left and second not in follower.left
    assert runs[-1] == 3  # the layers of the first, and all of the second


class Numbered(private.Follower):
    """Numbers calls, and notes the modules whose forwards run as plain Python."""

    def __init__(self) -> None:
        self.number = 0
        self.left: set[nn.Module | None] = set()

    def call(self) -> tuple[int, Any]:
        return self.number, None

    def skipped(self, code: Any, module: nn.Module | None, reason: str, error: Any) -> None:
        self.left.add(module)
