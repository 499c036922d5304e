"""Numbers that a forward reads from tensors and only computes with: inputs of its plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from api.test_decisions import plans_of
from tightfit.api.prove import prove
from tightfit.zoo import Example


class Base(nn.Module):
    """Counts its calls, and keeps a schedule that goes down."""

    budget = "45KiB"  # at which some of it is computed again

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("schedule", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.schedule.mul_(0.9)
        return self.loss(x)

    def out(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x) * factor).pow(2)).sum()


class Whole(Base):
    def loss(self, x):
        return self.out(x, 1.0 / self.count.item())


class Fraction(Base):
    def loss(self, x):
        return self.out(x.bfloat16().mul(float(self.schedule) * 2 + 1).float())


class ReadBefore(Base):
    """Reads what the step goes on to change, and uses it after that."""

    def forward(self, x):
        before = int(self.count)
        self.count.add_(1)
        return self.out(x) * (before + 1)


class Arguments(Base):
    """Numbers where operators take numbers, an exponent among them."""

    def loss(self, x):
        number = self.schedule.item()
        x = torch.add(x, x, alpha=number).clamp(max=number) + torch.full_like(x, -number)
        return self.out(x.abs()).pow(2) * number**2


class Computed(Base):
    """A number that follows from parameters."""

    budget = "54KiB"

    def loss(self, x):
        hidden = torch.tanh(self.a(x))
        return self.b(hidden / hidden.abs().max().item()).sum()


class Returned(Base):
    def loss(self, x):
        number = self.schedule.item()
        return {"loss": self.out(x, number), "number": number, "count": self.count.item()}


class Momentum(Base):
    """A factor that is another one in every step, as PyTorch's own code reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, momentum=None)

    def loss(self, x):
        return self.out(self.norm(x))


class Queue(Base):
    """Writes where a pointer says, and moves it: the keys of momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, 24))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        kept = self.queue.clone()
        with torch.no_grad():
            place = int(self.place)
            self.queue[:, place : place + 4] = x[:4].double().T
            self.place[0] = (place + 4) % 24
        return self.out(x) + self.b(self.a(x @ kept @ kept.T)).sum()


class Ring(Base):
    """Writes one row after the other, and a number into one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(13, 16))

    def loss(self, x):
        self.ring[int(self.count)] = x[0].detach()
        self.ring[0, 0] = self.schedule.item()
        return self.out(x + self.ring.sum(0))


class Compared(Base):
    """One number decides, another one does not."""

    def loss(self, x):
        return self.out(x, self.schedule.item() if self.count.item() > 3 else 1.0)


class OfItsClass(Base):
    """Asks of what class the number is, which a symbol would answer otherwise."""

    def loss(self, x):
        number = self.schedule.item()
        return self.out(x, number if isinstance(number, float) else 7.0)


class Chance(Base):
    """The number is a probability: where it is 0, nothing is drawn."""

    def loss(self, x):
        return self.out(nn.functional.dropout(x, self.schedule.item()))


class Size(Base):
    def loss(self, x):
        return self.out(x[: self.count.item()])


INPUTS = (Whole, Fraction, ReadBefore, Arguments, Returned, Momentum, Queue, Ring, Computed)
DECISIONS = (Compared, OfItsClass, Chance, Size)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [*INPUTS, *DECISIONS])
def test_a_number_that_decides_nothing_takes_no_plan_of_its_own(kind: type[Base]):
    torch.manual_seed(0)
    plain = kind()
    fitted = copy.deepcopy(plain)
    expected = [steps_of(plain) for _ in range(2)]
    optimizer = torch.optim.SGD(fitted.parameters())
    options = {"optimizer": optimizer, "costs": "unit", "cache": False}
    tightfit.fit(fitted, kind.budget, **options)
    assert steps_of(fitted) == expected[0]
    known = plans_of(fitted)
    assert steps_of(fitted) == expected[1]
    assert kind in DECISIONS or plans_of(fitted) == known


def steps_of(model: nn.Module) -> list[Any]:
    """Return all that six steps give: losses, gradients, buffers, what is returned besides."""
    found: list[Any] = []
    for seed in range(6):
        torch.manual_seed(seed)
        model.zero_grad()
        output = model(torch.randn(32, 16))
        rest = output if isinstance(output, dict) else {"loss": output}
        loss = rest.pop("loss")
        loss.backward()
        assert all(isinstance(x, int | float) for x in rest.values())
        found += [loss.item(), rest, [b.tolist() for b in model.buffers()]]
        found += [p.grad.tolist() for p in model.parameters() if p.grad is not None]
    return found


def test_a_proof_of_a_norm_that_averages_over_all_steps_ends():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.BatchNorm1d(64, momentum=None), nn.ReLU(), nn.Linear(64, 1)]
    inputs, target = torch.randn(32, 16), torch.randn(32, 1)
    example = Example(nn.Sequential(*layers), nn.functional.mse_loss, (inputs,), target)
    proof = prove(lambda: example, budget_ratio=1.0, rounds=1, cache=False)
    assert proof.bitwise and proof.holds


class Experts(nn.Module):
    """A mixture of experts with noisy gating: who works for whom is drawn again in every step."""

    def __init__(self, size: int = 32, count: int = 4) -> None:
        super().__init__()
        self.gate, self.noise = nn.Linear(size, count), nn.Linear(size, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(x), len(self.experts)) * nn.functional.softplus(self.noise(x))
        weights, chosen = (self.gate(x) + noise).topk(2)
        weights, output = weights.softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if len(token) > 0:
                share = weights[token, slot, None]
                output = output.index_add(0, token, share * expert(x[token]))
        return output


@pytest.mark.parametrize(
    ("layers", "said"),
    [(1, "it is another graph in every call"), (2, "data decide sizes inside of")],
)
def test_experts_that_are_drawn_settle(layers: int, said: str, capsys):
    """Whether one of them is most of the model, or one of several."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)
            self.layers = nn.ModuleList(Experts() for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = x + layer(x)
            return self.last(x).sum()

    torch.manual_seed(0)
    plain = Net()
    fitted = copy.deepcopy(plain)
    results, announced = [], []
    for model in (plain, fitted):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if model is fitted:
            tightfit.fit(model, "16MiB", optimizer=optimizer, costs="unit", cache=False)
        torch.manual_seed(1)
        losses = []
        for _ in range(20):
            loss = model(torch.randn(64, 16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            announced.append(capsys.readouterr().err)
        results.append([losses, [p.tolist() for p in model.parameters()]])
    assert results[0] == results[1]
    announcements = announced[20:]
    assert sum(said in text for text in announcements) == 1
    assert not any("plan" in text for text in announcements[6:])
