"""Ways of training, each a function of a model, its optimizer's maker and batches."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

Fit = Callable[[nn.Module, "torch.optim.Optimizer | None"], nn.Module]
"""Fits a model, or leaves it plain: a way calls it where a user would call `tightfit.fit`."""

WAYS: dict[str, Callable[[nn.Module, Fit], list[torch.Tensor]]] = {}


class Net(nn.Module):
    """Convolutions, BatchNorm and dropout, small enough for hundreds of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.GELU(),
            nn.Dropout(0.2),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Scale(nn.Module):
    """Reads a number in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [2.0]

    def forward(self, x):
        return x * self.factors[0]


def batches(count: int = 3, size: int = 8) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches; the global generator is seeded before each."""
    for seed in range(count):
        torch.manual_seed(seed)
        yield torch.randn(size, 3, 8, 8), torch.randint(0, 4, (size,))


def sgd(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def way(name: str):
    """Put a way of training into the table."""

    def add(function):
        WAYS[name] = function
        return function

    return add


def fitted_with_sgd(model: nn.Module, fit: Fit) -> torch.optim.Optimizer:
    """Fit a model; return its optimizer."""
    optimizer = sgd(model)
    fit(model, optimizer)
    return optimizer


def steps(model, optimizer, count: int = 3, size: int = 8, loss_of=None) -> list[torch.Tensor]:
    loss_of = loss_of or (lambda x, y: F.cross_entropy(model(x), y))
    losses = []
    for x, y in batches(count, size):
        loss = loss_of(x, y)
        loss.backward()
        losses.append(loss.detach().clone())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return losses


@way("gradient accumulation")
def accumulation(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        losses.append(loss.detach().clone())
        del loss
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@way("several forwards before a backward")
def several(model, fit):
    optimizer = fitted_with_sgd(model, fit)

    def loss_of(x, y):
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(3)), y)

    return steps(model, optimizer, loss_of=loss_of)


@way("several backwards through a forward (`retain_graph`)")
def retained(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = []
    for x, y in batches():
        output = model(x)
        first, second = F.cross_entropy(output, y), output.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [first.detach(), second.detach(), torch.rand(1)]
        del output, first, second
    return losses


@way("several backwards through a forward of several graphs")
def retained_by_graphs(model, fit):
    handle = model.body[3].register_forward_hook(lambda *_: print(end=""))
    losses = retained(model, fit)
    handle.remove()
    return losses


@way("tasks weighed by their gradients (GradNorm) in a model of several graphs")
def balanced(model, fit):
    handle = model.body[3].register_forward_hook(lambda *_: print(end=""))
    optimizer = fitted_with_sgd(model, fit)
    losses = []
    for x, y in batches():
        output = model(x)
        tasks = [F.cross_entropy(output, y), output.square().mean()]
        shared = model.body[0].weight
        slopes = [torch.autograd.grad(task, shared, retain_graph=True)[0] for task in tasks]
        loss = sum((task / slope.norm() for task, slope in zip(tasks, slopes, strict=True)), 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach(), torch.rand(1)]
        del output, tasks, slopes, loss
    handle.remove()
    return losses


@way("a gradient penalty (`create_graph`) through a model of several graphs")
def penalised_by_graphs(model, fit):
    handle = model.body[3].register_forward_hook(lambda *_: print(end=""))
    optimizer = sgd(model)
    fit(model.eval(), optimizer)
    losses = []
    for x, _ in batches():
        x.requires_grad_()
        score = model(x)[:, 0].sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        loss = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del score, slope, loss
    handle.remove()
    return losses


@way("autocast with GradScaler")
def scaler(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for x, y in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        losses.append(loss.detach().clone())
        del loss
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


@way("clipping of gradients")
def clipping(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    norms = []
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        nn.utils.clip_grad_value_(model.parameters(), 0.001)
        optimizer.step()
        optimizer.zero_grad()
    return norms


@way("zero_grad(set_to_none=False)")
def kept_gradients(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = []
    for x, y in batches():
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.detach().clone())
        del loss
        optimizer.step()
    return losses


@way("optimizer in backward hooks")
def in_backward(model, fit):
    fit(model, None)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def descend(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    losses = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.detach().clone())
    return losses


@way("hooks on parameters' gradients")
def gradient_hooks(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return steps(model, optimizer)


@way("channels_last")
def channels_last(model, fit):
    model.to(memory_format=torch.channels_last)
    optimizer = fitted_with_sgd(model, fit)

    def loss_of(x, y):
        return F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)

    return steps(model, optimizer, loss_of=loss_of)


@way("bfloat16 weights")
def bfloat16(model, fit):
    model.bfloat16()
    optimizer = fitted_with_sgd(model, fit)

    def loss_of(x, y):
        return F.cross_entropy(model(x.bfloat16()).float(), y)

    return steps(model, optimizer, loss_of=loss_of)


@way("fused and foreach optimizers")
def fused(model, fit):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fit(model, optimizer)
    losses = steps(model, optimizer)
    return losses + steps(model, sgd(model, foreach=True))


@way("a closure called several times a step (LBFGS)")
def lbfgs(model, fit):
    fit(model, None)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    losses = []
    for x, y in batches(2):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        losses.append(torch.as_tensor(optimizer.step(closure)))
    return losses


@way("averaged weights (SWA, EMA)")
def averaged(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    averages = [
        torch.optim.swa_utils.AveragedModel(model),
        torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        ),
    ]
    losses = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.detach().clone())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average.update_parameters(model)
    return losses + [p.detach() for a in averages for p in a.parameters()]


@way("a search for the learning rate")
def finder(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    losses = []
    for rate in (1e-3, 1e-1, 10.0):
        optimizer.param_groups[0]["lr"] = rate
        losses += steps(model, optimizer, 1)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return losses + steps(model, optimizer)


@way("loops that skip a step")
def skipping(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = []
    for number, (x, y) in enumerate(batches(5)):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.detach().clone())
        if number == 1:
            del loss
            continue
        loss.backward()
        del loss
        if number != 3:
            optimizer.step()
        optimizer.zero_grad()
    return losses


@way("validation between steps")
def validation(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = []
    for context in (torch.no_grad, torch.inference_mode):
        losses += steps(model, optimizer, 2)
        model.eval()
        with context():
            losses += [F.cross_entropy(model(x), y).clone() for x, y in batches(1, size=5)]
        model.train()
    return losses


@way("training in eval mode (frozen BatchNorm)")
def eval_mode(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    model.eval()
    losses = steps(model, optimizer)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses += steps(model, optimizer, 1)
    return losses


@way("freezing and unfreezing parts")
def freezing(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = []
    for frozen in (True, False):
        model.body.requires_grad_(not frozen)
        losses += steps(model, optimizer, 2)
    return losses


@way("a loss changed in place")
def scaled_in_place(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = []
    for x, y in batches():
        output = model(x)
        output.mul_(0.5)
        loss = F.cross_entropy(output, y)
        loss /= 3
        loss.backward()
        losses.append(loss.detach().clone())
        del loss, output
        optimizer.step()
        optimizer.zero_grad()
    return losses


@way("modules changed between steps: replaced, parametrized, other modes, hooks")
def changed(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = steps(model, optimizer, 2)
    model.body[5].p = 0.5
    model.body[1].eval()
    losses += steps(model, optimizer, 2)
    model.body[4] = nn.ReLU()
    model.train()
    losses += steps(model, optimizer, 2)
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Softplus())
    losses += steps(model, optimizer, 2)
    nn.utils.parametrize.remove_parametrizations(model.head, "weight")
    model.body[4] = Scale()
    losses += steps(model, optimizer, 1)
    model.body[4].factors[0] = 3.0
    losses += steps(model, optimizer, 1)
    double = nn.modules.module.register_module_forward_hook(
        lambda module, _, output: 2 * output if isinstance(module, Scale) else None
    )
    losses += steps(model, optimizer, 1)
    double.remove()
    return losses + steps(model, optimizer, 1)


@way("other weights for a call (`torch.func.functional_call`)")
def other_weights(model, fit):
    fit(model, None)
    weights = {k: (p / 2).detach().requires_grad_() for k, p in model.named_parameters()}
    found = []
    for x, y in batches():
        loss = F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
        found += [loss.detach(), *torch.autograd.grad(loss, list(weights.values()))]
        del loss
    return found


@way("a last batch of another size")
def last_batch(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    return [loss for size in (8, 8, 5, 8) for loss in steps(model, optimizer, 1, size)]


class Stop(Exception):
    """Raised by a test in the middle of a step."""


@way("exceptions and KeyboardInterrupt in a step")
def interrupted(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = steps(model, optimizer, 1)
    for error in (Stop, KeyboardInterrupt):

        def fail(_, error=error):
            raise error

        handle = model.head.weight.register_hook(fail)
        for x, y in batches(1):
            with contextlib.suppress(Stop, KeyboardInterrupt):
                F.cross_entropy(model(x), y).backward()
        handle.remove()
        optimizer.zero_grad()
        for x, _ in batches(1):
            with contextlib.suppress(Stop, KeyboardInterrupt):
                _ = model(x)
                raise error
            del _
        losses += steps(model, optimizer, 1)
    return losses


@way("resuming from a checkpoint")
def resumed(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = steps(model, optimizer, 2)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    other = Net()
    optimizer = sgd(other)
    fit(other, optimizer)
    other.load_state_dict(saved["model"], assign=True)
    optimizer = sgd(other)
    optimizer.load_state_dict(saved["optimizer"])
    losses += steps(other, optimizer, 2)
    return losses + [p.detach() for p in other.parameters()]


@way("deepcopy of a fitted model")
def copied(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses = steps(model, optimizer, 2)
    twin = copy.deepcopy(model)
    losses += steps(twin, sgd(twin), 2)
    return losses + steps(model, optimizer, 1) + [p.detach() for p in twin.parameters()]


@way("training in a thread")
def threaded(model, fit):
    optimizer = fitted_with_sgd(model, fit)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: losses.extend(steps(model, optimizer, 2)))
        thread.start()
        thread.join()
    return losses
