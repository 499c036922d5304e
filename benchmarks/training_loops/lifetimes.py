"""Loops that differ in what lives from one call to the next, and in what comes between calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_loops.run import Run

__all__ = [
    "autoencoder",
    "batches_mixed",
    "calls_without_backward",
    "critic_outside",
    "data_made_before",
    "features_outside",
    "gradients_cleared_late",
    "inputs_perturbed",
    "old_output_held",
    "picture_trained",
    "stepped_by_hooks",
    "two_models_one_backward",
    "weights_penalised",
    "weights_penalised_in_place",
]


def layers(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


def old_output_held(run: Run) -> None:
    """The output of the step before lives until the next call has returned."""
    width = run.size(128, 512)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(width, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.layers(x)
            return out, out.square().mean()

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    run.fit(net, optimizer=optimizer)
    for _ in range(run.steps):
        out, loss = net(torch.randn(width, width))
        run.step(loss, optimizer)
    del out
    run.trained(net)


def gradients_cleared_late(run: Run) -> None:
    """Gradients of the step before are let go of between forward and backward."""
    width = run.size(128, 512)
    net = layers(width, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    run.fit(net, optimizer=optimizer)
    for _ in range(run.steps):
        loss = net(torch.randn(width, width)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(net)


def weights_penalised(run: Run) -> None:
    """A penalty on the weights is a part of the loss: its gradients wait for those of the net."""
    _penalised(run, to_none=True)


def weights_penalised_in_place(run: Run) -> None:
    """The same, and gradients are set to zero in place: three of each weight exist at a time."""
    _penalised(run, to_none=False)


def _penalised(run: Run, *, to_none: bool) -> None:
    width, rows = run.size(256, 1024), run.size(16, 64)
    net = layers(width, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    run.fit(net, optimizer=optimizer)
    for _ in range(run.steps):
        optimizer.zero_grad(set_to_none=to_none)
        loss = net(torch.randn(rows, width)).square().mean()
        loss = loss + 1e-4 * sum(weight.abs().sum() for weight in net.parameters())
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(net)


def stepped_by_hooks(run: Run) -> None:
    """A hook of each parameter steps an optimizer of its own and frees its gradient."""
    width, rows = run.size(256, 1024), run.size(16, 64)
    net = layers(width, 6)
    optimizers = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in net.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    run.fit(net)
    for _ in range(run.steps):
        loss = net(torch.randn(rows, width)).square().mean()
        loss.backward()
        run.note(loss)
    run.trained(net)


def batches_mixed(run: Run) -> None:
    """Two calls of a net that is larger than its activations have one backward."""
    width, rows = run.size(256, 1024), run.size(16, 64)
    net = layers(width, 6)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    run.fit(net, optimizer=optimizer)
    for _ in range(run.steps):
        x, y = torch.randn(rows, width), torch.randn(rows, width)
        loss = 0.3 * F.mse_loss(net(x), y) + 0.7 * F.mse_loss(net(x.flip(0)), y)
        run.step(loss, optimizer)
    run.trained(net)


def inputs_perturbed(run: Run) -> None:
    """A first backward asks for the gradient of the input only, as adversarial training does."""
    width, rows = run.size(256, 1024), run.size(16, 64)
    net = layers(width, 6)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    run.fit(net, optimizer=optimizer)
    for _ in range(run.steps):
        x, y = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)
        (gradient,) = torch.autograd.grad(F.mse_loss(net(x), y), x)
        optimizer.zero_grad()
        loss = F.mse_loss(net(x.detach() + 0.1 * gradient.sign()), y)
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(net)


def features_outside(run: Run) -> None:
    """A list of features is returned, and the loss outside reads a little of each."""
    rows = run.size(1024, 4096)

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: Tensor) -> list[Tensor]:
            found = []
            for layer in self.layers:
                x = F.relu(layer(x))
                found.append(x)
            return found

    net = Features()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run.fit(net, optimizer=optimizer)
    for _ in range(run.steps):
        loss = torch.stack([a[:8].square().mean() for a in net(torch.randn(rows, 64))]).sum()
        run.step(loss, optimizer)
    run.trained(net)


def picture_trained(run: Run) -> None:
    """Style transfer: the network is frozen, the picture is trained by LBFGS."""
    side = run.size(24, 64)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
    ).requires_grad_(False)

    def gram(features: Tensor) -> Tensor:
        flat = features[0].flatten(1)
        return flat @ flat.T / flat.numel()

    picture = nn.Parameter(torch.rand(1, 3, side, side))
    with torch.no_grad():
        target = gram(net(torch.rand(1, 3, side, side)))
    optimizer = torch.optim.LBFGS([picture], max_iter=4, history_size=4)
    run.fit(net, optimizer=optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(gram(net(picture)), target) * 1e4
        loss.backward()
        return loss

    for _ in range(run.steps):
        run.note(optimizer.step(closure))
    run.trained(net)


def calls_without_backward(run: Run) -> None:
    """A Q-network chooses actions with gradients switched on; most calls have no backward."""
    width = run.size(120, 480)
    net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    optimizer = torch.optim.Adam(net.parameters())
    run.fit(net, optimizer=optimizer)
    for _ in range(run.steps):
        for _ in range(3):
            net(torch.randn(1, 4)).argmax()
        loss = net(torch.randn(128, 4)).square().mean()
        run.step(loss, optimizer)
    run.trained(net)


def critic_outside(run: Run) -> None:
    """Of a GAN only the generator is fitted; the critic trains between its forward and backward."""
    width = run.size(64, 256)
    make = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
    judge = nn.Sequential(nn.Linear(width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 1))
    makes = torch.optim.Adam(make.parameters())
    judges = torch.optim.Adam(judge.parameters())
    run.fit(make, optimizer=makes)
    for _ in range(run.steps):
        fake = make(torch.randn(64, 64))
        judges.zero_grad()
        judge(fake.detach()).mean().backward()
        judges.step()
        makes.zero_grad()
        loss = judge(fake).square().mean()
        loss.backward()
        makes.step()
        run.note(loss)
    run.trained(make)


def two_models_one_backward(run: Run) -> None:
    """Two models share a budget and one backward."""

    def net() -> nn.Sequential:
        halves = [m for _ in range(8) for m in (nn.Linear(128, 128), nn.ReLU())]
        return nn.Sequential(*halves, nn.Linear(128, 4))

    first, second = net(), net()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    budget = run.budget()
    run.fit(first, budget, optimizer=optimizer)
    run.fit(second, budget, optimizer=optimizer)
    rows = run.size(512, 4096)
    for _ in range(run.steps):
        loss = first(torch.randn(rows, 128)).square().mean()
        loss = loss + second(torch.randn(rows * 3 // 2, 128)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(first, second)


def data_made_before(run: Run) -> None:
    """All batches are parts of a data set that was there before `fit`."""
    width, rows = run.size(32, 128), run.size(512, 4096)
    net = nn.Sequential(
        nn.Linear(8 * width, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 1),
    )
    optimizer = torch.optim.Adam(net.parameters())
    examples, targets = torch.randn(4 * rows, 8 * width), torch.randn(4 * rows, 1)
    run.fit(net, optimizer=optimizer)
    for step in range(run.steps):
        part = slice(step % 4 * rows, (step % 4 + 1) * rows)
        optimizer.zero_grad()
        loss = F.mse_loss(net(examples[part]), targets[part])
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(net)


def autoencoder(run: Run) -> None:
    """A variational autoencoder, its loss outside."""
    hidden = run.size(100, 400)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads = nn.Linear(784, hidden)
            self.mean, self.spread = nn.Linear(hidden, 20), nn.Linear(hidden, 20)
            self.writes = nn.Sequential(
                nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 784), nn.Sigmoid()
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            read = F.relu(self.reads(x))
            mean, spread = self.mean(read), self.spread(read)
            return self.writes(mean + torch.randn_like(mean) * spread.exp()), mean, spread

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    run.fit(net, optimizer=optimizer)
    for _ in range(run.steps):
        batch = torch.rand(128, 784)
        optimizer.zero_grad()
        made, mean, spread = net(batch)
        loss = F.binary_cross_entropy(made, batch, reduction="sum")
        loss = loss + (mean.square() + spread.exp() - spread).sum()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(net)
