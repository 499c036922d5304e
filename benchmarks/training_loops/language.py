"""Language models: carried states, held logits, evaluation and generation between steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_loops.run import Run

__all__ = [
    "evaluation_between_steps",
    "logits_held",
    "state_in_an_argument",
    "state_in_an_attribute",
]

WORDS = 256


class Recurrent(nn.Module):
    """An LSTM that is given its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.first, self.second = nn.LSTMCell(width, width), nn.LSTMCell(width, width)
        self.head = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, WORDS)
        )

    def forward(
        self, tokens: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs = []
        h1, c1, h2, c2 = state
        for x in self.words(tokens).unbind(1):
            h1, c1 = self.first(x, (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            outputs.append(h2)
        return self.head(torch.stack(outputs, 1)), (h1, c1, h2, c2)


def state_in_an_argument(run: Run) -> None:
    """Truncated back-propagation through time: the state goes in and out, detached."""
    width, length, batch = run.size(16, 192), run.size(3, 24), run.size(8, 32)
    model = Recurrent(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    run.fit(model, optimizer=optimizer)

    state = tuple(torch.zeros(batch, width) for _ in range(4))
    for _ in range(run.steps):
        text = torch.randint(0, WORDS, (batch, length + 1))
        state = tuple(s.detach() for s in state)
        logits, state = model(text[:, :-1], state)
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        run.note(loss)
    run.trained(model)


class WithMemory(nn.Module):
    """A block of attention that also looks at what it saw in the call before."""

    def __init__(self, width: int, batch: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.project = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, WORDS)
        self.memory = torch.zeros(batch, length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        seen = torch.cat([self.memory, x], 1)
        self.memory = x.detach()
        q = self.project(x).chunk(3, -1)[0]
        _, k, v = self.project(seen).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return self.head(x + self.mlp(x))


def state_in_an_attribute(run: Run) -> None:
    """A memory of the segment before, kept by the model itself in a plain attribute."""
    width, length, batch = run.size(16, 128), run.size(8, 64), run.size(4, 16)
    model = WithMemory(width, batch, length)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        text = torch.randint(0, WORDS, (batch, length + 1))
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        run.step(loss, optimizer)
    run.trained(model)


class Layer(nn.Module):
    """Causal attention and a feed-forward part, each around the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Predicts the next token; returns logits, and the loss if it is given the targets."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits[:, -1:], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits, _ = self(tokens[:, -self.length :])
            drawn = torch.multinomial(logits[:, -1].softmax(-1), 1)
            tokens = torch.cat([tokens, drawn], 1)
        return tokens


def logits_held(run: Run) -> None:
    """`logits, loss = model(x, y)`: the logits of a step live until those of the next are there."""
    length, batch = run.size(16, 128), run.size(8, 32)
    model = Transformer(run.size(16, 128), run.size(1, 2), length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        text = torch.randint(0, WORDS, (batch, length + 1))
        x, y = text[:, :-1], text[:, 1:]
        logits, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.note(loss, (logits.argmax(-1) == y).float().mean())
    run.trained(model)


def evaluation_between_steps(run: Run) -> None:
    """Every second step the model is evaluated and writes a text, then training goes on."""
    length, batch = run.size(16, 96), run.size(4, 16)
    model = Transformer(run.size(16, 128), run.size(1, 4), length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)

    run.fit(model, optimizer=optimizer)

    for step in range(run.steps):
        text = torch.randint(0, WORDS, (batch, length + 1))
        _, loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        measured = [loss.detach()]
        if step % 2:
            model.eval()
            with torch.no_grad():
                text = torch.randint(0, WORDS, (batch, length + 1))
                measured.append(model(text[:, :-1], text[:, 1:])[1])
            measured.append(model.generate(text[:1, :4], 4).sum())
            model.train()
        run.note(*measured)
    run.trained(model)
