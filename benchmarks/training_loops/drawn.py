"""Small training loops drawn at random: what they hold between calls, how, and for how long."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_loops.run import Run

__all__ = ["Habits", "drawn_loop"]


@dataclass(frozen=True)
class Habits:
    """How a loop is written.

    Parameters
    ----------
    width, rows : int
        Of the model and of a batch.
    optimizer : str
        Which one.
    tells_optimizer : bool
        Whether `fit` is given it.
    clears : str
        When gradients are cleared: before the forward, between forward and backward, or after the
        step.
    to_none : bool
        Whether clearing frees them.
    keeps : str
        Which of the last output and loss live until the next ones are there.
    loss : str
        Inside of the model, or in which form outside.
    calls : int
        Forwards and backwards before the optimizer steps.
    besides : str
        Further calls of the model without a backward.
    other : str
        A second model, trained between the batches: plain, or within the same budget.
    seed : int
        Of its layers.
    data : str
        Whether each batch is made when it is needed; else they are parts of a tensor, which is made
        before `fit` or after it.
    assigns : str
        Whether the last output lives until the new one is there, or until its loss is, too.
    breaks : bool
        Whether Dynamo ends a graph in the middle of the model, where it looks at a value.
    """

    width: int
    rows: int
    optimizer: Literal["sgd", "momentum", "adam"]
    tells_optimizer: bool
    clears: Literal["before", "between", "after"]
    to_none: bool
    keeps: Literal["nothing", "output", "loss", "both"]
    loss: Literal["inside", "squares", "classes", "slice", "two", "detached", "divergence"]
    calls: int
    besides: Literal["nothing", "no_grad", "no_backward"]
    other: Literal["none", "plain", "shares"]
    seed: int
    data: Literal["new", "before", "after"]
    assigns: Literal["in turn", "at once"]
    breaks: bool


def drawn_loop(seed: int, *, breaks: bool = False) -> tuple[Habits, Callable[[Run], None]]:
    """Return a loop, always the same for a seed, and how it is written."""
    draw = random.Random(seed)
    habits = Habits(
        width=draw.choice([64, 128, 256]),
        rows=draw.choice([64, 256, 1024]),
        optimizer=draw.choice(["sgd", "momentum", "adam"]),
        tells_optimizer=draw.random() < 0.6,
        clears=draw.choice(["before", "between", "after"]),
        to_none=draw.random() < 0.8,
        keeps=draw.choice(["nothing", "output", "loss", "both"]),
        loss=draw.choice(
            ["inside", "squares", "classes", "slice", "two", "detached", "divergence"]
        ),
        calls=draw.choice([1, 1, 1, 2]),
        besides=draw.choice(["nothing", "nothing", "no_grad", "no_backward"]),
        other=draw.choice(["none", "none", "plain", "shares"]),
        seed=draw.randrange(1 << 30),
        data=draw.choice(["new", "before", "after"]),
        assigns=draw.choice(["in turn", "in turn", "at once"]),
        breaks=breaks,
    )

    def loop(run: Run) -> None:
        _train(run, habits)

    loop.__name__ = f"drawn_in_graphs_{seed}" if breaks else f"drawn_{seed}"
    return habits, loop


class _Batches:
    """Parts of one tensor in turn, once that is made; until then each batch is a new tensor."""

    def __init__(self, habits: Habits) -> None:
        self._rows, self._width = habits.rows, habits.width
        self._parts: itertools.cycle[Tensor] | None = None

    def make(self) -> None:
        self._parts = itertools.cycle(torch.randn(3 * self._rows, self._width).chunk(3))

    def following(self) -> Tensor:
        if self._parts is None:
            return torch.randn(self._rows, self._width)
        return next(self._parts)


class _Net(nn.Module):
    def __init__(self, layers: nn.Sequential, loss: str) -> None:
        super().__init__()
        self.layers, self.loss = layers, loss

    def forward(self, x: Tensor) -> Any:
        return self.outputs(self.layers(x))

    def outputs(self, out: Tensor) -> Any:
        if self.loss == "inside":
            return out, out.square().mean()
        return (out, out.tanh()) if self.loss == "two" else (out, out)


class _NetInGraphs(_Net):
    """It looks at a value between two of its layers."""

    def __init__(self, layers: nn.Sequential, loss: str) -> None:
        super().__init__(layers, loss)
        self.first, self.rest = layers[: len(layers) // 2], layers[len(layers) // 2 :]

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        scale = 1.0 if x.detach().mean().item() > 1e-3 else 0.9
        return self.outputs(self.rest(x * scale))


def _train(run: Run, habits: Habits) -> None:
    draw = random.Random(habits.seed)
    kind = _NetInGraphs if habits.breaks else _Net
    net = kind(_layers(draw, habits.width), habits.loss)
    other = _layers(draw, habits.width) if habits.other != "none" else None
    optimizer = _optimizer(net, habits)
    others = _optimizer(other, habits) if other is not None else None
    shares = habits.other == "shares"
    budget = run.budget() if shares else None
    batches = _Batches(habits)
    if habits.data == "before":
        batches.make()
    run.fit(net, budget, **({"optimizer": optimizer} if habits.tells_optimizer else {}))
    if habits.data == "after":
        batches.make()
    if shares and other is not None:
        run.fit(other, budget, **({"optimizer": others} if habits.tells_optimizer else {}))
    out = loss = None
    for _ in range(run.steps):
        total = 0.0
        if habits.clears == "before":
            optimizer.zero_grad(set_to_none=habits.to_none)
        for _ in range(habits.calls):
            batch = batches.following()
            _call_besides(net, batch, habits)
            if other is not None and others is not None:
                batch = _trained_besides(other, others, batch)
            if habits.assigns == "in turn":
                out, made = net(batch)
                out, loss = _outside(out, made, habits)
                del made
            else:
                out, loss = _outside(*net(batch), habits)
            if habits.clears == "between" and habits.calls == 1:
                optimizer.zero_grad(set_to_none=habits.to_none)
            loss.backward()
            total += loss.item()
            if habits.keeps in ("nothing", "loss"):
                out = None
            if habits.keeps in ("nothing", "output"):
                loss = None
        optimizer.step()
        if habits.clears == "after" or (habits.clears == "between" and habits.calls > 1):
            optimizer.zero_grad(set_to_none=habits.to_none)
        run.note(total)
    del out, loss
    run.trained(net)


def _layers(draw: random.Random, width: int) -> nn.Sequential:
    kinds: list[Callable[[], nn.Module]] = [
        nn.ReLU,
        nn.Tanh,
        nn.GELU,
        nn.Identity,
        lambda: nn.LayerNorm(width),
        lambda: nn.Dropout(0.3),
    ]
    count = draw.randint(1, 3)
    return nn.Sequential(
        *[m for _ in range(count) for m in (nn.Linear(width, width), draw.choice(kinds)())]
    )


def _optimizer(model: nn.Module, habits: Habits) -> torch.optim.Optimizer:
    if habits.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-3)
    momentum = 0.9 if habits.optimizer == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)


def _call_besides(net: nn.Module, batch: Tensor, habits: Habits) -> None:
    if habits.besides == "no_grad":
        with torch.no_grad():
            net(batch)
    elif habits.besides == "no_backward":
        net(batch[:8])


def _trained_besides(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    made = model(batch)
    loss = made.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return made.detach()


def _outside(out: Tensor, made: Tensor, habits: Habits) -> tuple[Tensor, Tensor]:
    """Return the output and the loss."""
    if habits.loss == "inside":
        return out, made
    if habits.loss == "squares":
        return out, F.mse_loss(out, torch.zeros_like(out))
    if habits.loss == "classes":
        return out, F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))
    if habits.loss == "slice":
        return out, out[:8].square().mean()
    if habits.loss == "two":
        return out, out.mean() + made.square().mean()
    if habits.loss == "detached":
        return out, (out - out.detach().roll(1, 0)).abs().mean()
    even = torch.full_like(out, 1 / habits.width)
    return out, F.kl_div(F.log_softmax(out, -1), even, reduction="batchmean")
