"""Models that Dynamo breaks into several graphs, for they look at values, log, or leave PyTorch."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_loops.run import Run

__all__ = [
    "adaptive_depth",
    "branch_on_value",
    "calls_summed",
    "cleared_between",
    "disabled_layer",
    "early_stopping",
    "function_in_break",
    "gradients_summed",
    "logged_values",
    "lstm_logged",
    "numpy_inside",
    "outputs_kept",
    "ragged_lists",
    "routed_experts",
    "second_model",
]


def perceptron(width: int, hidden: int, layers: int = 1) -> nn.Sequential:
    """Linear layers with GELUs between them."""
    block = lambda: (nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))  # noqa: E731
    return nn.Sequential(*(layer for _ in range(layers) for layer in block()))


class Branching(nn.Module):
    """The mean of what the first layers return decides which layers follow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = perceptron(width, 4 * width)
        self.positive, self.negative = perceptron(width, 2 * width), perceptron(width, 6 * width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        branch = self.positive if x.mean().item() > 0 else self.negative
        return self.head(branch(x))


def branch_on_value(run: Run) -> None:
    """A value decides which of two branches runs."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = Branching(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        x, y = torch.randn(rows, width), torch.randint(0, 10, (rows,))
        run.step(F.cross_entropy(model(x), y), optimizer)
    run.trained(model)


class Logging(nn.Module):
    """Blocks, each of which writes the norm of its output into a log."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(perceptron(width, 4 * width) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.log = io.StringIO()

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
            print(f"norm {x.norm().item():.3f}", file=self.log)
        return x


def logged_values(run: Run) -> None:
    """Each block logs a value of what it returns."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = Logging(width, run.size(3, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    run.fit(model)

    for _ in range(run.steps):
        loss = model(torch.randn(rows, width)).square().mean()
        run.step(loss, optimizer)
    run.trained(model)


class Disabled(nn.Module):
    """A layer in the middle that the compiler must leave alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = perceptron(width, 4 * width, 2), perceptron(width, 4 * width, 2)
        self.middle = nn.Linear(width, 2 * width)

    @torch.compiler.disable
    def mixed(self, x: Tensor) -> Tensor:
        a, b = self.middle(x).chunk(2, -1)
        return a * torch.sigmoid(b) + x

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.mixed(self.before(x)))


def disabled_layer(run: Run) -> None:
    """A layer between others is excluded with torch.compiler.disable."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = Disabled(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        x = torch.randn(rows, width)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(model)


class Weighing(nn.Module):
    """Weighs samples by ranks that numpy computes of a score."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.score = perceptron(width, 4 * width, 2), nn.Linear(width, 1)
        self.head = perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        scores = self.score(x)
        torch._dynamo.graph_break()
        order = scores.detach().numpy()[:, 0].argsort().argsort()
        weights = torch.from_numpy(order / len(order)).to(x.dtype)
        return self.head(x * scores.sigmoid()) * weights[:, None]


def numpy_inside(run: Run) -> None:
    """Numpy ranks the samples in the middle of the forward."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = Weighing(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        run.step(model(torch.randn(rows, width)).square().mean(), optimizer)
    run.trained(model)


class Refining(nn.Module):
    """Repeats a layer until its output changes little."""

    def __init__(self, width: int, most: int) -> None:
        super().__init__()
        self.most = most
        self.first, self.again = nn.Linear(width, width), perceptron(width, 4 * width)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for _ in range(self.most):
            better = (x + self.again(x)).tanh()
            change = (better - x).abs().mean().item()
            x = better
            if change < 0.12:
                break
        return self.last(x)


def adaptive_depth(run: Run) -> None:
    """A layer is repeated until its output changes little, a few times at most."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = Refining(width, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    run.fit(model, optimizer=optimizer)

    for step in range(run.steps):
        x = torch.randn(rows, width) * (0.3 if step % 3 else 1.5)
        run.step((model(x) - x).square().mean(), optimizer)
    run.trained(model)


class Ragged(nn.Module):
    """Encodes sequences of different lengths one by one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.body, self.head = perceptron(width, 4 * width), nn.Linear(width, 5)

    @torch.compiler.disable
    def pooled(self, sequences: list[Tensor]) -> Tensor:
        return torch.stack([sequence.max(0).values for sequence in sequences])

    def forward(self, lists: list[Tensor]) -> Tensor:
        return self.head(self.pooled([self.body(self.embed(words)) for words in lists]))


def ragged_lists(run: Run) -> None:
    """A list of sequences of other lengths in every step."""
    width, longest = run.size(32, 128), run.size(64, 256)
    model = Ragged(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        lengths = torch.randint(longest // 2, longest, (8,)).tolist()
        lists = [torch.randint(0, 100, (length,)) for length in lengths]
        run.step(F.cross_entropy(model(lists), torch.randint(0, 5, (8,))), optimizer)
    run.trained(model)


class Quantise(torch.autograd.Function):
    """Rounds; passes gradients on, cut to the range of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        ctx.save_for_backward(x)
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 1), None


class Quantised(nn.Module):
    """Layers whose activations are rounded to as many steps as their size asks for."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(perceptron(width, 4 * width) for _ in range(layers))

    @torch.compiler.disable
    def quantised(self, x: Tensor) -> Tensor:
        steps = math.ceil(8 / max(x.abs().max().item(), 0.1))
        return Quantise.apply(x, steps)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.quantised(layer(x))
        return x


def function_in_break(run: Run) -> None:
    """An autograd function of user code runs between the graphs."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = Quantised(width, run.size(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        run.step(model(torch.randn(rows, width)).square().mean(), optimizer)
    run.trained(model)


class Reading(nn.Module):
    """A recurrent cell that stops reading once all samples are sure."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.sure = nn.GRUCell(width, width), nn.Linear(width, 1)
        self.head = nn.Linear(width, 4)

    def forward(self, sequence: Tensor) -> Tensor:
        state = torch.zeros_like(sequence[0])
        for x in sequence:
            state = self.cell(x, state)
            if self.sure(state).sigmoid().min().item() > 0.45:
                break
        return self.head(state)


def early_stopping(run: Run) -> None:
    """A recurrent cell stops reading when it is sure."""
    width, rows, length = run.size(32, 128), run.size(128, 512), 6
    model = Reading(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        x, y = torch.randn(length, rows, width), torch.randint(0, 4, (rows,))
        run.step(F.cross_entropy(model(x), y), optimizer)
    run.trained(model)


class Routed(nn.Module):
    """Each sample goes to the expert with the highest score, chosen in Python."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(perceptron(width, 4 * width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = scores.argmax(-1)
        y = torch.zeros_like(x)
        for index in sorted(set(chosen.tolist())):
            here = torch.where(chosen == index)[0]
            y = y.index_add(0, here, self.experts[index](x[here]) * scores[here, index, None])
        return x + y


def routed_experts(run: Run) -> None:
    """Experts that Python chooses by the values of a gate."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = nn.Sequential(nn.Linear(16, width), Routed(width, 4), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        x, y = torch.randn(rows, 16), torch.randint(0, 10, (rows,))
        run.step(F.cross_entropy(model(x), y), optimizer)
    run.trained(model)


class Tagger(nn.Module):
    """An LSTM between graphs: its states are logged."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(200, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 9))
        self.sizes: list[float] = []

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(words))
        self.sizes.append(states.abs().mean().item())
        return self.head(states)


def lstm_logged(run: Run) -> None:
    """An LSTM whose states are logged before the head runs."""
    width, rows, length = run.size(32, 96), run.size(16, 32), run.size(24, 32)
    model = Tagger(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        words = torch.randint(0, 200, (rows, length))
        tags = torch.randint(0, 9, (rows, length))
        run.step(F.cross_entropy(model(words).flatten(0, 1), tags.flatten()), optimizer)
    run.trained(model)


def calls_summed(run: Run) -> None:
    """Two calls of a model in several graphs before one backward."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = Logging(width, run.size(2, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        x = torch.randn(rows, width)
        one, other = model(x + 0.1 * torch.randn_like(x)), model(x + 0.1 * torch.randn_like(x))
        run.step(1 - F.cosine_similarity(one, other).mean(), optimizer)
    run.trained(model)


def gradients_summed(run: Run) -> None:
    """Gradients of several batches are summed before the optimizer steps."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = Branching(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        total = 0.0
        for _batch in range(3):
            x, y = torch.randn(rows, width), torch.randint(0, 10, (rows,))
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        run.note(total)
    run.trained(model)


def cleared_between(run: Run) -> None:
    """Wide layers; gradients are cleared between the forward and the backward."""
    width, rows = run.size(128, 384), run.size(64, 256)
    model = Logging(width, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        x = torch.randn(rows, width)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(model)


def outputs_kept(run: Run) -> None:
    """The last output and its loss live until the next ones are there; the loss is outside."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model = Quantised(width, run.size(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    run.fit(model)

    output = loss = torch.zeros(())
    for _ in range(run.steps):
        x = torch.randn(rows, width)
        output = model(x)
        near = torch.cdist(output[: rows // 2], x[: rows // 2])
        loss = F.cross_entropy(-near, torch.arange(rows // 2)) + output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss, output.detach().mean())
    del output, loss
    run.trained(model)


def second_model(run: Run) -> None:
    """A second model, which is not fitted, judges the output of the first."""
    width, rows = run.size(32, 128), run.size(256, 1024)
    model, judge = Disabled(width), perceptron(width, 4 * width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        x = torch.randn(rows, width)
        made = model(x)
        judges.zero_grad()
        judged = (judge(x) - judge(made.detach())).mean()
        judged.backward()
        judges.step()
        optimizer.zero_grad()
        loss = judge(made).square().mean()
        loss.backward()
        optimizer.step()
        run.note(judged, loss)
    run.trained(model, judge)
