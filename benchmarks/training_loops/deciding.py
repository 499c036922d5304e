"""Where data decide what runs: experts chosen by noisy gates, and a game that is played."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_loops.run import Run

__all__ = ["mixture_of_experts", "proximal_policy"]


class Experts(nn.Module):
    """Sends each token to its two best experts, with noise on the scores while training."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate, self.noise = nn.Linear(width, experts), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        if self.training:
            scores = scores + torch.randn_like(scores) * F.softplus(self.noise(x))
        best, chosen = scores.topk(2, -1)
        weights = best.softmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == index)
            if len(tokens):
                y = y.index_add(0, tokens, weights[tokens, place, None] * expert(x[tokens]))
        return x + y


def mixture_of_experts(run: Run) -> None:
    """A mixture of experts with noisy gates: who computes what is another matter in every step."""
    width, tokens = run.size(16, 128), run.size(32, 512)
    model = nn.Sequential(
        nn.Linear(32, width),
        Experts(width, run.size(3, 6)),
        nn.LayerNorm(width),
        Experts(width, run.size(3, 6)),
        nn.LayerNorm(width),
        nn.Linear(width, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        x, y = torch.randn(tokens, 32), torch.randint(0, 10, (tokens,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(model)


class Player(nn.Module):
    """Looks at a picture; says what to do and what the game is worth."""

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.eyes = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(8 * width),
            nn.Tanh(),
        )
        self.action, self.value = nn.Linear(8 * width, actions), nn.Linear(8 * width, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        features = self.eyes(seen)
        return self.action(features).log_softmax(-1), self.value(features).squeeze(-1)


def proximal_policy(run: Run) -> None:
    """PPO: a rollout under no_grad, then two epochs over minibatches of it."""
    moves, players, side = run.size(4, 16), run.size(4, 16), run.size(8, 32)
    model = Player(run.size(4, 16), 4)
    model(torch.zeros(1, 1, side, side))  # lazy layers learn their shapes
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5)

    run.fit(model, optimizer=optimizer)

    world = torch.rand(players, 1, side, side)
    for _ in range(run.steps):
        seen, actions, chances, values, rewards = [], [], [], [], []
        with torch.no_grad():
            for _move in range(moves):
                log_probabilities, value = model(world)
                action = torch.multinomial(log_probabilities.exp(), 1).squeeze(1)
                seen.append(world)
                actions.append(action)
                chances.append(log_probabilities.gather(1, action[:, None]).squeeze(1))
                values.append(value)
                rewards.append(world.mean((1, 2, 3)) * (action - 1.5))
                world = (world.roll(1, -1) + 0.1 * action[:, None, None, None]) % 1
            returns, later = [], model(world)[1]
            for reward in reversed(rewards):
                later = reward + 0.99 * later
                returns.insert(0, later)
        states, old = torch.cat(seen), torch.cat(chances)
        taken, wanted = torch.cat(actions), torch.cat(returns)
        gain = wanted - torch.cat(values)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        losses = []
        for _epoch in range(2):
            for part in torch.randperm(len(states)).chunk(2):
                log_probabilities, value = model(states[part])
                ratio = (log_probabilities.gather(1, taken[part, None])[:, 0] - old[part]).exp()
                better = torch.min(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part])
                entropy = -(log_probabilities.exp() * log_probabilities).sum(1).mean()
                loss = -better.mean() + 0.5 * F.mse_loss(value, wanted[part]) - 0.01 * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.item())
        run.note(*losses)
    run.trained(model)
