"""A loss that takes an output and the model's own loss: planned again in its first backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tightfit
from benchmarks.training_loops import Run, live
from support.lives import assert_trained_alike


class Student(nn.Module):
    """Returns its loss and its prediction, as the models of `transformers` do."""

    def __init__(self, dropout: float, norm: bool = False) -> None:
        super().__init__()
        layers = [
            layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(dropout))
        ]
        self.body = nn.Sequential(*layers, *[nn.BatchNorm1d(32)] * norm)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": (logits - y).square().mean(), "logits": logits}


class Counting(Student):
    """Scales by how often it has run."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls.add_(1)
        return super().forward(x * self.calls, y)


def distilled(run: Run, dropout: float = 0.0, norm: bool = False) -> None:
    """Learn from data and from a teacher, whose share is no part of the model's own loss."""
    model, teacher = Student(dropout, norm), nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.fit(model, optimizer=optimizer)
    for _ in range(run.steps):
        x = torch.randn(128, 32)
        with torch.no_grad():
            wanted = teacher(x)
        output = model(x, torch.randn(128, 32))
        loss = output["loss"] + 0.5 * (output["logits"] - wanted).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss, torch.rand(1).item())
        del output, loss
    run.trained(model)


@pytest.mark.parametrize(
    "dropout, norm",
    [(0.0, False), (0.3, False), (0.3, True)],
    ids=["no draws", "dropout", "dropout and running statistics"],
)
def test_bits_and_budget_from_the_first_step_on(dropout: float, norm: bool, capfd) -> None:
    def lived(budget_bytes: int | None):
        return live(
            lambda run: distilled(run, dropout, norm),
            Run(budget_bytes, steps=4, small=True, costs="unit"),
        )

    plain = lived(None)
    fitted = lived(int(0.9 * plain.whole_bytes))
    assert_trained_alike(plain, fitted)
    assert capfd.readouterr().err.count("an output that had no gradient before") == 1


def test_calls_that_cannot_run_twice_are_refused_once() -> None:
    model = tightfit.fit(Counting(), "1GiB", costs="unit")
    x, y = torch.randn(8, 32), torch.randn(8, 32)

    def step() -> None:
        output = model(x, y)
        (output["loss"] + output["logits"].mean()).backward()

    with pytest.raises(
        tightfit.PlanMismatch, match=r"writes model.calls and reads it.*Run the step again"
    ):
        step()
    step()


def logits_only(output: dict[str, Tensor]) -> None:
    output["logits"].abs().mean().backward()


def loss_first(output: dict[str, Tensor]) -> None:
    output["loss"].backward(retain_graph=True)
    output["logits"].abs().mean().backward()


def logits_first(output: dict[str, Tensor]) -> None:
    output["logits"].abs().mean().backward(retain_graph=True)
    output["loss"].backward()


@pytest.mark.parametrize("go_back", [logits_only, loss_first, logits_first])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["no draws", "dropout"])
def test_backwards_that_leave_out_the_models_own_loss_have_all_gradients(
    dropout: float, go_back: Callable[[dict[str, Tensor]], None]
) -> None:
    """In the first step, too, whose plan expects a gradient of the loss only."""

    def loop(run: Run) -> None:
        model = Student(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.fit(model, optimizer=optimizer)
        for _ in range(run.steps):
            optimizer.zero_grad()
            output = model(torch.randn(128, 32), torch.randn(128, 32))
            go_back(output)
            optimizer.step()
            run.note(output["loss"].detach(), *[p.grad.sum().item() for p in model.parameters()])
        run.trained(model)

    plain, fitted = (live(loop, Run(b, steps=4, small=True, costs="unit")) for b in (None, 1 << 30))
    assert_trained_alike(plain, fitted)
