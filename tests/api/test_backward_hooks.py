"""Hooks that write a buffer of their module while gradients flow: right, under a true message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit

pytestmark = [
    pytest.mark.filterwarnings("ignore:hooks on module"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("norm", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def writing(module: Any, gradient: Tensor) -> None:
    module.count += 1
    module.norm.copy_(gradient.norm())


def assigning(module: Any, gradient: Tensor) -> None:
    module.count = module.count + 1
    module.norm = gradient.norm()


def full(module: nn.Module, write: Callable[[Any, Tensor], None]) -> None:
    module.register_full_backward_hook(lambda m, _, outputs: write(m, outputs[0]))


def before(module: nn.Module, write: Callable[[Any, Tensor], None]) -> None:
    module.register_full_backward_pre_hook(lambda m, outputs: write(m, outputs[0]))


def of_output(module: nn.Module, write: Callable[[Any, Tensor], None]) -> None:
    def forward_hook(m: nn.Module, _: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: write(m, gradient))

    module.register_forward_hook(forward_hook)


HOOKS = [full, before, of_output]


def make(hook: Callable[..., None], write: Callable[[Any, Tensor], None]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Watched(), Watched(), nn.Linear(8, 8))
    hook(model[1], write)
    hook(model[2], write)
    return model


@pytest.mark.parametrize("write", [writing, assigning])
@pytest.mark.parametrize("hook", HOOKS)
def test_every_step_writes_what_the_plain_one_writes(
    hook: Callable[..., None], write: Callable[[Any, Tensor], None]
) -> None:
    results = []
    for fitted in (False, True):
        model = make(hook, write)
        if fitted:
            tightfit.fit(model, "1GiB", costs="unit", cache=False)
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(4, 8)).square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        results.append([*model.state_dict().values(), *gradients])
        assert float(model[1].count) == 3
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Doubled(torch.autograd.Function):
    """Doubles its input; its backward counts in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(count)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.saved_tensors[0].add_(1)
        return gradient * 2, None


class Counting(Watched):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.layer(x), self.count)


def test_the_message_names_the_buffer_and_capture_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tightfit.fit(Counting(), "1GiB", costs="unit", cache=False)
    outputs = model(torch.randn(4, 8))
    assert "writes the buffer 'model.count'" in capsys.readouterr().err
    assert float(model.count) == 0
    outputs.sum().backward()
    assert float(model.count) == 1


class WithItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layer(x)
        return z.square().mean(), z


def test_hooks_of_ours_are_no_reason_to_warn_of_saved_outputs(tmp_path: Path) -> None:
    model = tightfit.fit(WithItsLoss(), "1MiB", costs="unit")
    loss, z = model(torch.randn(4, 8))
    torch.save((loss, z), tmp_path / "outputs.pt")  # a warning is an error here
    loss.backward()
    assert model.layer.weight.grad is not None
