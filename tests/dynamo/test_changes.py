"""Whatever a user changes between two steps, the fitted model does what plain PyTorch does."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.nn.utils import parametrize

import tightfit

THIS = sys.modules[__name__]
FACTOR = 2.0
TABLE = {"factor": 1.0}


def scaled(x: Tensor) -> Tensor:
    """Is replaced by another function in one of the cases."""
    return x * FACTOR


class Options:
    """A plain object that a module reads."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.steps = [1.0, 2.0]

    def lowered(self, x: Tensor) -> Tensor:
        return x - 0.1


class Block(nn.Module):
    power = 1

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.options = options
        self.flag = False
        self.extra: list[nn.Module] = []
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.layer(x))) + self.shift
        for step in self.options.steps:
            x = self.options.lowered(scaled(x)) * step * self.options.scale * TABLE["factor"]
        if self.flag:
            x = x.tanh()
        for module in self.extra:
            x = module(x)
        if os.environ.get("TIGHTFIT_TEST_CHANGES"):
            x = x * 3
        return self.raised(x.sigmoid())

    def raised(self, x: Tensor) -> Tensor:
        return x**self.power


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(Options()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def _hook_of_all(
    register: Callable[..., Any], hook: Callable[..., Any]
) -> Callable[[Any], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def registered(_: nn.Module) -> Iterator[None]:
        handle = register(hook)
        try:
            yield
        finally:
            handle.remove()

    return registered


def _other_weight(model: nn.Module) -> None:
    block = model.blocks[0]
    block.layer.weight = nn.Parameter(block.layer.weight.detach() * 2)


def _other_layer(model: nn.Module) -> None:
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.1)
    model.blocks[1].layer = layer


def _tied(model: nn.Module) -> None:
    model.blocks[1].layer.weight = model.blocks[0].layer.weight


def _replaced_forward(model: nn.Module) -> None:
    block = model.blocks[0]
    own = block.forward
    block.forward = lambda x: own(x) * 5


def _loaded(model: nn.Module) -> None:
    state = {name: t + 1 if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "evaluation": lambda m: m.eval() and None,
    "one module in evaluation": lambda m: m.blocks[1].norm.eval() and None,
    "a flag": lambda m: setattr(m.blocks[0], "flag", True),
    "an attribute of an object": lambda m: setattr(m.blocks[0].options, "scale", 0.5),
    "a list that grows": lambda m: m.blocks[0].options.steps.append(0.5),
    "a list with other values": lambda m: m.blocks[1].options.steps.__setitem__(0, 3.0),
    "modules in a plain list": lambda m: m.blocks[0].extra.append(nn.Tanh()),
    "a number of a module": lambda m: setattr(m.blocks[0].drop, "p", 0.7),
    "a constant of a norm": lambda m: setattr(m.blocks[0].norm, "eps", 0.1),
    "another parameter": _other_weight,
    "another module": _other_layer,
    "tied parameters": _tied,
    "loaded by assignment": _loaded,
    "a buffer replaced": lambda m: setattr(m.blocks[0], "shift", torch.ones(8)),
    "a frozen parameter": lambda m: setattr(m.blocks[0].layer.weight, "requires_grad", False),
    "another forward of a block": _replaced_forward,
    "a forward hook": lambda m: (
        m.blocks[0].layer.register_forward_hook(lambda *given: given[-1] * 2) and None
    ),
    "a forward hook before": lambda m: (
        m.blocks[0].register_forward_pre_hook(lambda _, given: (given[0] * 2,)) and None
    ),
    "a hook on the outermost module": lambda m: (
        m.register_forward_hook(lambda *given: given[-1] * 2) and None
    ),
    "a hook on a parameter": lambda m: (
        m.blocks[0].layer.weight.register_hook(lambda gradient: gradient * 2) and None
    ),
    "a parametrization": lambda m: (
        parametrize.register_parametrization(m.blocks[0].layer, "weight", Doubled()) and None
    ),
    "a global number": lambda _: patch.object(THIS, "FACTOR", 3.0),
    "a global function": lambda _: patch.object(THIS, "scaled", lambda x: x - 1),
    "a global dictionary": lambda _: patch.dict(TABLE, factor=0.25),
    "the environment": lambda _: patch.dict(os.environ, TIGHTFIT_TEST_CHANGES="1"),
    "a class attribute": lambda _: patch.object(Block, "power", 2),
    "the forward of a class": lambda _: patch.object(
        Block, "forward", lambda self, x: self.layer(x)
    ),
    "another method of a class": lambda _: patch.object(Block, "raised", lambda self, x: x * 7),
    "a method of an object": lambda _: patch.object(Options, "lowered", lambda self, x: x + 2),
    "autocast": lambda _: torch.autocast("cpu", dtype=torch.bfloat16),
    "a hook of all modules": _hook_of_all(
        hooks_of_all.register_module_forward_hook,
        lambda module, _, output: output * 2 if isinstance(module, nn.Linear) else None,
    ),
    "a hook of all modules before": _hook_of_all(
        hooks_of_all.register_module_forward_pre_hook,
        lambda module, given: (given[0] * 2,) if isinstance(module, nn.Linear) else None,
    ),
}


def step(model: nn.Module, seed: int) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(seed)
    random.seed(seed)
    loss = model(torch.randn(4, 8))
    loss.backward()
    found = [loss.detach(), torch.rand(1), *(p.grad for p in model.parameters())]
    return [*found, *(b.clone() for b in model.buffers())]


def assert_alike(fitted: nn.Module, plain: nn.Module, seed: int) -> None:
    for mine, reference in zip(step(fitted, seed), step(plain, seed), strict=True):
        assert (mine is None) == (reference is None)
        assert mine is None or torch.equal(mine, reference)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.filterwarnings("ignore:hooks on module")
def test_a_change_between_two_steps(change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    plain = Model()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for seed in range(2):
        assert_alike(fitted, plain, seed)
    around = [change(model) for model in (plain, fitted)]
    # what is around is the same for both: once
    with around[0] if around[0] is not None else contextlib.nullcontext():
        for seed in range(2, 4):
            assert_alike(fitted, plain, seed)
    if around[0] is not None:
        assert_alike(fitted, plain, 4)
