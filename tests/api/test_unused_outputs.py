"""Parameters behind an output that receives no gradient have none, as in plain PyTorch."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tightfit
from benchmarks.training_loops import Run, live
from tightfit.capture.trace import numbers


class Heads(nn.Module):
    """Two heads on one trunk; with a value read in Python it is trained in parts."""

    def __init__(self, in_parts: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(16, width) for width in (3, 2))
        self.in_parts = in_parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.trunk(x)
        if self.in_parts:
            assert h.detach().numpy().size
        return tuple(head(h) for head in self.heads)


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("period", [1, 2, 100], ids=["in turns", "in pairs", "one of them"])
def test_heads_that_are_trained_in_turns(period: int, in_parts: bool) -> None:
    def loop(run: Run) -> None:
        model = Heads(in_parts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        run.fit(model)
        for step in range(run.steps):
            loss = model(torch.randn(4, 8))[step // period % 2].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.note(loss)
        run.trained(model)

    plain, fitted = (live(loop, Run(b, steps=7, small=True)) for b in (None, 1 << 30))
    assert not fitted.error
    assert fitted.losses == plain.losses and fitted.parameters == plain.parameters


def test_what_is_used_late_is_refused_once_and_then_planned(capfd) -> None:
    plain = Heads(False)
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")
    x = torch.randn(4, 8)
    for _ in range(4):
        model(x)[0].sum().backward()
    assert "output(s) [1] receive no gradient" in capfd.readouterr().err
    with pytest.raises(tightfit.PlanMismatch, match=r"output 1.*were to have none.*Run the step"):
        model(x)[1].sum().backward()
    model.zero_grad()
    for head in (1, 0, 0, 0, 0, 1):
        for each in (plain, model):
            each(x)[head].sum().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


class WithItsLoss(nn.Module):
    """Returns its loss and what it has predicted, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x).tanh()
        return {"loss": logits.square().mean(), "logits": logits}


def test_outputs_returned_with_a_loss_take_no_second_trace() -> None:
    model = tightfit.fit(WithItsLoss(), "1GiB", costs="unit", cache=False)
    with patch.object(numbers, "trace", wraps=numbers.trace) as traces:
        output = model(torch.randn(4, 8))
        output["loss"].backward()
    assert traces.call_count == 1
    assert output["logits"].requires_grad  # as plain PyTorch returns it


class Recurrent(nn.Module):
    """Returns its prediction and the state to go on from, which the loop detaches."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden = []
        for word in x.unbind(1):
            state = self.cell(word, state)
            hidden.append(state[0])
        return self.head(torch.stack(hidden, 1)), state


def test_states_that_are_detached_take_no_second_trace(capfd) -> None:
    """What would be left out without their gradients is next to nothing."""

    def loop(run: Run) -> None:
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.fit(model, optimizer=optimizer)
        state = (torch.zeros(4, 16), torch.zeros(4, 16))
        for _ in range(run.steps):
            output, state = model(torch.randn(4, 24, 8), tuple(s.detach() for s in state))
            loss = output.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.note(loss)
        run.trained(model)

    plain = live(loop, Run(None, steps=6, small=True))
    with patch.object(numbers, "trace", wraps=numbers.trace) as traces:
        fitted = live(loop, Run(int(0.75 * plain.largest_bytes), steps=6, small=True))
    assert not fitted.error
    assert fitted.losses == plain.losses and fitted.parameters == plain.parameters
    assert fitted.largest_bytes <= int(0.75 * plain.largest_bytes)
    assert traces.call_count == 1 and "receive no gradient" not in capfd.readouterr().err
