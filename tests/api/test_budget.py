"""Several fitted models under one budget: a GAN, and a student with its averaged teacher."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
from torch import nn

import tightfit
from benchmarks.training_loops import Life, Run, live
from tightfit.allocator import meter_for
from tightfit.errors import BudgetExceeded, InfeasibleBudget
from tightfit.execution.attach import attached


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)
    )
    critic = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )
    return generator, critic


def train(generator, critic, optimizers, steps: int = 4) -> list[torch.Tensor]:
    """Return the losses; the critic sees real and made samples one after the other."""
    first, second = optimizers
    losses = []
    for seed in range(steps):
        torch.manual_seed(seed)
        real, noise = torch.randn(128, 16), torch.randn(128, 8)
        with torch.no_grad():
            made = generator(noise)
        for samples, sign in ((real, -1), (made, 1)):
            loss = sign * critic(samples).mean()
            loss.backward()
            losses.append(loss.detach().clone())
            del loss
        second.step()
        second.zero_grad()
        loss = -critic(generator(noise)).mean()
        loss.backward()
        losses.append(loss.detach().clone())
        del loss
        first.step()
        first.zero_grad()
        second.zero_grad()
    return losses + [p.detach() for m in (generator, critic) for p in m.parameters()]


def optimizers(generator, critic):
    return tuple(torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, critic))


def test_a_gan_trains_inside_one_budget() -> None:
    plain = networks()
    reference = train(*plain, optimizers(*plain))
    own = networks()
    first, second = optimizers(*own)
    budget = tightfit.Budget("420KiB")
    tightfit.fit(own[0], budget, optimizer=first, cache=False)
    tightfit.fit(own[1], budget, optimizer=second, cache=False)
    result = train(*own, (first, second))
    assert all(torch.equal(a, b) for a, b in zip(result, reference, strict=True))
    assert all(tightfit.report(m).planned_peak_bytes <= budget.size_bytes for m in own)
    meter = meter_for("cpu")
    lasting = sum(p.nbytes for m in own for p in m.parameters())
    start = meter.live_bytes()
    meter.reset_peak()
    train(*own, (first, second), steps=1)
    assert meter.peak_bytes() - start + lasting <= budget.size_bytes


def test_tensors_made_between_two_fits_count_for_both() -> None:
    budget = tightfit.Budget("3MiB")
    generator, critic = networks()
    tightfit.fit(generator, budget, cache=False)
    held = torch.zeros(1 << 19)  # 2 MiB
    tightfit.fit(critic, budget, cache=False)
    critic(torch.randn(16, 16)).sum().backward()
    with pytest.raises(RuntimeError, match="no room"):
        held = held, torch.zeros(1 << 18)


def test_members_leave_with_unfit_and_size_is_checked() -> None:
    budget = tightfit.Budget("1GiB")
    models = networks()
    for model in models:
        tightfit.fit(model, budget, costs="unit")
    x = torch.randn(4, 8)
    together = tightfit.prepare(models[0], x)
    assert together.budget_bytes == budget.size_bytes
    tightfit.unfit(models[1])
    assert "1 members" in repr(budget)
    tightfit.fit(models[0], budget, costs="unit")
    assert "1 members" in repr(budget)


def test_a_teacher_averaged_from_its_student() -> None:
    student, _ = networks()
    plain = copy.deepcopy(student)
    tightfit.fit(student, tightfit.Budget("1GiB"), costs="unit")
    weights = []
    for model in (plain, student):
        teacher = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(16, 8)
            (model(x) - teacher(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for a, b in zip(teacher.parameters(), model.parameters(), strict=True):
                    a.lerp_(b, 0.1)
        weights.append([*model.parameters(), *teacher.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert attached(student).options.shared is not None


def test_several_modules_in_one_step() -> None:
    plain, own = networks(), networks()
    noise = torch.randn(16, 8)
    planned = tightfit.step(
        lambda z: own[1](own[0](z)).mean(), modules=own, budget="1GiB", costs="unit"
    )
    planned(noise).backward()
    plain[1](plain[0](noise)).mean().backward()
    for a, b in zip(plain, own, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_two_models_with_one_backward_compute_nothing_twice_where_there_is_room() -> None:
    """Not in the second step, nor once costs were measured in steps and plans are made again."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)) for _ in range(2)]
    optimizer = torch.optim.Adam([*models[0].parameters(), *models[1].parameters()])
    budget = tightfit.Budget("64MiB")
    for model in models:
        tightfit.fit(model, budget, optimizer=optimizer, cache=False)
    overheads = []
    for _ in range(9):
        sum(model(torch.randn(512, 16)).square().mean() for model in models).backward()
        optimizer.step()
        optimizer.zero_grad()
        overheads.append([tightfit.report(model).overhead for model in models])
    assert not any(attached(model).is_tuning for model in models)
    assert overheads[-1] == [0.0, 0.0]


class Reader(nn.Module):
    """Reads a table that is given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 256)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return torch.tanh(torch.tanh(self.linear(x)) @ table).square().mean()


def test_tensors_that_several_calls_read_count_once() -> None:
    """A table of 2 MiB that three models read in one step, within 3 MiB."""
    torch.manual_seed(0)
    plain = [Reader() for _ in range(3)]
    fitted, budget = copy.deepcopy(plain), tightfit.Budget("3MiB")

    def gradients(models: list[nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        table = torch.randn(256, 2048)
        for _ in range(3):
            x = torch.randn(32, 8)
            sum(model(x, table) for model in models).backward()
        return [p.grad for model in models for p in model.parameters()]

    reference = gradients(plain)
    for model in fitted:
        tightfit.fit(model, budget, cache=False, costs="unit")
    for mine, expected in zip(gradients(fitted), reference, strict=True):
        assert torch.equal(mine, expected)


def cycles(run: Run) -> None:
    """Two generators in one budget, each of them called twice before a backward, and two critics.

    So do networks that learn a translation and its inverse.
    """
    torch.manual_seed(0)
    makers = [networks()[0] for _ in range(2)]
    back = nn.Linear(16, 8)
    critics = [networks()[1] for _ in range(2)]
    budget = run.budget()
    for model in (*makers, *critics):
        run.fit(model, budget)
    parameters = [p for m in (*makers, back) for p in m.parameters()]
    first = torch.optim.Adam(parameters, lr=1e-3)
    second = torch.optim.Adam([p for m in critics for p in m.parameters()], lr=1e-3)
    for _ in range(run.steps):
        given = [torch.randn(256, 8) for _ in makers]
        made = [maker(x) for maker, x in zip(makers, given, strict=True)]
        returned = [maker(back(y)) for maker, y in zip(makers, made[::-1], strict=True)]
        judged = [critic(y).mean() for critic, y in zip(critics, made, strict=True)]
        apart = [(a - b).abs().mean() for a, b in zip(made, returned, strict=True)]
        loss = sum(judged) + sum(apart)
        first.zero_grad()
        loss.backward()
        first.step()
        second.zero_grad()
        for critic, y in zip(critics, made, strict=True):
            (critic(torch.randn(256, 16)) - critic(y.detach())).mean().backward()
        second.step()
        run.note(loss)
    run.trained(*makers, back, *critics)


def test_members_that_are_called_twice_before_a_backward() -> None:
    def lived(budget_bytes: int | None) -> Life:
        return live(cycles, Run(budget_bytes, steps=4, small=True, costs="unit"))

    plain = lived(None)
    fitted = lived(int(0.6 * plain.whole_bytes))
    for _ in range(2):  # what is advised at first knows only the calls that were seen
        if fitted.advised_bytes is not None:
            assert fitted.largest_bytes <= (fitted.budget_bytes or 0)
            fitted = lived(fitted.advised_bytes)
    assert not fitted.error
    assert fitted.losses == plain.losses and fitted.parameters == plain.parameters
    assert fitted.largest_bytes <= (fitted.budget_bytes or 0) <= 1.1 * plain.whole_bytes


def cycles_of_four(budget: int) -> None:
    """Train two generators that run after each other, and both critics by one loss."""
    torch.manual_seed(0)
    sizes = [(8, 8), (8, 8), (8, 1), (8, 1)]
    models = [
        nn.Sequential(nn.Linear(a, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, b))
        for a, b in sizes
    ]
    forth, back, one, other = models
    shared = tightfit.Budget(budget)
    steps = [
        torch.optim.Adam(chain(a.parameters(), b.parameters())) for a, b in (models[:2], models[2:])
    ]
    for model, optimizer in zip(models, (steps[0], steps[0], steps[1], steps[1]), strict=True):
        tightfit.fit(model, shared, optimizer=optimizer, cache=False, costs="unit")
    for _ in range(3):
        x, y = torch.randn(64, 8), torch.randn(64, 8)
        same = (forth(y) - y).square().mean() + (back(x) - x).square().mean()
        fakes = forth(x), back(y)
        fooled = other(fakes[0]).mean() + one(fakes[1]).mean()
        cycle = (back(fakes[0]) - x).square().mean() + (forth(fakes[1]) - y).square().mean()
        (same + fooled + cycle).backward()
        steps[0].step()
        steps[0].zero_grad()
        made, back_made = fakes[0].detach(), fakes[1].detach()
        loss = one(x).mean() - one(back_made).mean() + other(y).mean() - other(made).mean()
        steps[1].zero_grad()
        loss.backward()
        steps[1].step()


def test_the_budget_for_calls_of_several_members_is_found_in_few_steps() -> None:
    budget, followed = 300 << 10, 0
    while True:
        try:
            return cycles_of_four(budget)
        except (InfeasibleBudget, BudgetExceeded) as error:
            is_planned = isinstance(error, InfeasibleBudget)
            advised = error.minimum_bytes if is_planned else error.measured_bytes
            assert advised is not None and advised > budget
            budget, followed = advised, followed + 1
        assert followed <= 2
