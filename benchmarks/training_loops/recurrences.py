"""Long recurrences: unrolled cells with LBFGS, and a state-space model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_loops.run import Run

__all__ = ["limited_memory", "state_space"]


class Unrolled(nn.Module):
    """Two LSTM cells, one step of the series after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.first, self.second = nn.LSTMCell(1, width), nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, series: Tensor) -> Tensor:
        state = [series.new_zeros(len(series), self.width) for _ in range(4)]
        outputs = []
        for x in series.split(1, 1):
            state[:2] = self.first(x, (state[0], state[1]))
            state[2:] = self.second(state[0], (state[2], state[3]))
            outputs.append(self.head(state[2]))
        return torch.cat(outputs, 1)


def limited_memory(run: Run) -> None:
    """Sine waves predicted by 60 pairs of unrolled cells, trained with LBFGS and its closure."""
    length, batch = run.size(3, 60), run.size(32, 64)
    model = Unrolled(run.size(12, 51))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3, history_size=4)

    run.fit(model, optimizer=optimizer)

    places = torch.arange(length + 1) + torch.randint(-20, 20, (batch, 1))
    waves = torch.sin(places / 5.0)
    for _ in range(run.steps):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(waves[:, :-1]), waves[:, 1:])
            loss.backward()
            return loss

        run.note(optimizer.step(closure))
    run.trained(model)


class Scan(nn.Module):
    """A selective state-space layer, its recurrence written as a loop."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(width, states).log())
        self.pace, self.both = nn.Linear(width, width), nn.Linear(width, 2 * states)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        pace = F.softplus(self.pace(x))
        inwards, outwards = self.both(x).chunk(2, -1)
        kept = torch.exp(-pace[..., None] * self.decay.exp())
        added = (pace * x)[..., None] * inwards[:, :, None]
        state, outputs = torch.zeros_like(kept[:, 0]), []
        for step in range(x.shape[1]):
            state = kept[:, step] * state + added[:, step]
            outputs.append((state * outwards[:, step, None]).sum(-1))
        return x + self.out(torch.stack(outputs, 1))


def state_space(run: Run) -> None:
    """A state-space model over short series."""
    width, length, batch = run.size(8, 64), run.size(4, 32), run.size(4, 16)
    model = nn.Sequential(
        nn.Linear(4, width),
        *(nn.Sequential(nn.LayerNorm(width), Scan(width, 8)) for _ in range(run.size(1, 2))),
        nn.Linear(width, 4),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        series = torch.randn(batch, length + 1, 4).cumsum(1)
        loss = F.mse_loss(model(series[:, :-1]), series[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(model)
