"""A backward that is differentiated itself: the bits of plain PyTorch, or a refusal by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tightfit
from tightfit.allocator import measure_peak
from tightfit.errors import BudgetExceeded, TightfitError


def critic(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.LeakyReLU(0.2, inplace=True), *more, nn.Linear(32, 32), nn.Tanh(),
        nn.Linear(32, 1),
    )  # fmt: skip


def slope(output, x):
    return torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)[0]


def gradient_penalty(model, real, fake):
    """Of a Wasserstein GAN: two more calls of the critic are open meanwhile."""
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    truth, lie = model(real), model(fake)
    steep = slope(model(between), between).norm(2, dim=1)
    return lie.mean() - truth.mean() + 10 * ((steep - 1) ** 2).mean()


def penalty_on_data(model, real, fake):
    """R1: the loss takes the output together with its derivative."""
    real.requires_grad_()
    output = model(real)
    return slope(output.sum(), real).square().sum(1).mean() + F.softplus(output).mean()


def equation(model, real, fake):
    """A physics-informed net: second derivatives in two directions, data from another call."""
    x, t = real[:, :8].clone().requires_grad_(), real[:, 8:].clone().requires_grad_()
    field = model(torch.cat([x, t], 1))
    along_x, along_t = slope(field, x), slope(field, t)
    rest = along_t.sum(1) - slope(along_x, x).sum(1)
    return rest.square().mean() + model(fake).square().mean()


def length_of_slope(model, real, fake):
    """A penalty on gradients of parameters; nothing else holds the input by then."""
    gradients = torch.autograd.grad(model(real * 2).sum(), model[0].weight, create_graph=True)
    return gradients[0].square().mean() + model(fake).square().mean()


def adapted(model, real, fake):
    """Meta-learning: what stands for the parameters in later calls was computed."""
    own = dict(model.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(model, own, (real,)).mean()
        steep = torch.autograd.grad(loss, [*own.values()], create_graph=True)
        own = {name: p - 0.1 * g for (name, p), g in zip(own.items(), steep, strict=True)}
    return torch.func.functional_call(model, own, (fake,)).square().mean()


def adapted_by_squares(model, real, fake):
    """The derivative of a loss that is not linear in the output leads back through it."""
    own = dict(model.named_parameters())
    for _ in range(2):
        output = torch.func.functional_call(model, own, (real,))
        loss = F.mse_loss(output, real[:, :1])
        steep = torch.autograd.grad(loss, [*own.values()], create_graph=True)
        own = {name: p - 0.1 * g for (name, p), g in zip(own.items(), steep, strict=True)}
    return F.mse_loss(torch.func.functional_call(model, own, (fake,)), fake[:, :1])


def curvature(model, real, fake):
    """Products with the Hessian of a loss, differentiated once more."""
    weights = [*model.parameters()]
    loss = F.mse_loss(model(real).sigmoid(), fake[:, :1].sigmoid())
    steep = torch.autograd.grad(loss, weights, create_graph=True)
    along = sum((g * torch.ones_like(g)).sum() for g in steep)
    products = torch.autograd.grad(along, weights, create_graph=True)
    return loss + sum(g.square().sum() for g in products)


WAYS = [
    gradient_penalty,
    penalty_on_data,
    equation,
    length_of_slope,
    adapted,
    adapted_by_squares,
    curvature,
]


def trained(model: nn.Module, way) -> list[torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        loss = way(model, torch.randn(64, 16), torch.randn(64, 16))
        optimizer.zero_grad()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*found, *model.state_dict().values()]


@pytest.mark.parametrize("layer", [nn.Identity(), nn.Dropout(0.5), nn.BatchNorm1d(32)])
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_plain_pytorch(way, layer) -> None:
    """Also where the forward draws random numbers, or writes statistics."""
    plain = critic(layer)
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")
    for expected, found in zip(trained(plain, way), trained(model, way), strict=True):
        assert torch.equal(expected, found)


def test_gradients_of_parameters_with_a_history() -> None:
    plain, x = critic(), torch.randn(8, 16)
    found = []
    for model in (plain, tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")):
        weights = [model[0].weight, model[2].weight]
        gradients = torch.autograd.grad(model(x).sum(), weights, create_graph=True)
        sum(g.square().sum() for g in gradients).backward()
        found.append([*gradients, *(w.grad for w in weights)])
    assert all(map(torch.equal, *found))


def test_hooks_come_once_and_see_the_whole_gradient() -> None:
    """Of a parameter and of an input; a gradient that is kept is not added up twice either."""
    plain, found = critic(), []
    for model in (plain, tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")):
        seen = []
        model[0].weight.register_hook(lambda gradient, seen=seen: seen.append(gradient) or gradient)
        torch.manual_seed(1)
        x = torch.randn(8, 16, requires_grad=True) * 2
        x.register_hook(lambda gradient: 3 * gradient)
        x.retain_grad()
        output = model(x)
        (slope(output.sum(), x).square().sum() + output.mean()).backward()
        found.append([*seen, x.grad, model[0].weight.grad])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


def test_what_does_not_fit_is_refused_before_it_is_there() -> None:
    """The plan's own steps are small; twelve layers with a history are not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(64, 64), nn.Tanh())))
    budget_bytes = 6 * 2**20
    x = torch.randn(2048, 64, requires_grad=True)
    tightfit.fit(model, budget_bytes, costs="unit")

    def step() -> None:
        with pytest.raises(BudgetExceeded, match="differentiated backward takes"):
            slope(model(x), x)

    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    _, measured = measure_peak(step, device="cpu")
    assert measured.peak_bytes + parameters <= budget_bytes


def test_what_is_derived_of_a_derivative_keeps_to_the_budget() -> None:
    model, x = critic(), torch.randn(64, 16, requires_grad=True)
    tightfit.fit(model, 4 * 2**20, costs="unit")
    for _ in range(3):
        steep = slope(model(x), x)
        with pytest.raises(RuntimeError, match="has no room"):
            torch.empty(4 * 2**20)
        steep.square().sum().backward()
        model.zero_grad()
    tightfit.unfit(model)


def test_what_a_derivative_holds_is_not_counted_twice() -> None:
    """What plain PyTorch takes is about enough: a call without its plan teaches nothing."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )  # fmt: skip
    model = copy.deepcopy(plain)

    def train(model: nn.Module) -> None:
        for _ in range(3):
            x, t = (torch.rand(2000, 1, requires_grad=True) for _ in range(2))
            field = model(torch.cat([x, t], 1))
            along_x, along_t = slope(field, x), slope(field, t)
            rest = along_t - slope(along_x, x)
            start = model(torch.cat([x, 0 * t], 1)) - torch.sin(x)
            (rest.square().mean() + start.square().mean()).backward()
            model.zero_grad()

    _, measured = measure_peak(lambda: train(plain), device="cpu")
    tightfit.fit(model, int(1.1 * measured.peak_bytes))
    train(model)


def test_what_plain_pytorch_takes_is_enough() -> None:
    """A plan's forward runs again, and its gradients come at once: plain PyTorch takes less."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2)]
        return nn.Sequential(*layers, nn.Linear(256, 1))

    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            x = torch.randn(64, 256, requires_grad=True)
            output = model(x)
            loss = slope(output, x).square().sum(1).mean() - output.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    expected, measured = measure_peak(lambda: train(made()), device="cpu")
    model = tightfit.fit(made(), measured.peak_bytes, cache=False)
    found = train(model)
    tightfit.unfit(model)
    assert all(map(torch.equal, expected, found))


def test_another_mode_after_the_call_changes_nothing_of_it() -> None:
    torch.manual_seed(0)
    plain = critic()
    found = []
    for model in (plain, tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")):
        torch.manual_seed(1)
        x = torch.randn(8, 16, requires_grad=True)
        output = model(x)
        model.eval()
        slope(output, x).square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None] + [x.grad])
    assert all(map(torch.equal, *found))


def test_a_second_backward_after_one_that_freed_the_graph_is_refused() -> None:
    model, x = tightfit.fit(critic(), "1GiB", costs="unit"), torch.randn(8, 16, requires_grad=True)
    output = model(x)
    loss = slope(output.square(), x).square().sum() + output.sum()
    loss.backward()
    with pytest.raises(TightfitError, match=r"a second time.*retain_graph=True"):
        output.sum().backward()


class TestRefused:
    def refused(self, model, reason, change=lambda model: None):
        x = torch.randn(8, 16, requires_grad=True)
        output = tightfit.fit(model, "1GiB", costs="unit")(x)
        change(model)
        with pytest.raises(TightfitError, match=rf"create_graph.*{reason}"):
            slope(output, x)

    def test_a_buffer_that_is_read_and_written(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.ones(1))

            def forward(self, x):
                self.scale.mul_(2)
                return x * self.scale

        self.refused(critic(Counting()), "writes .*scale and reads")

    def test_changed_parameters(self):
        self.refused(critic(), "changed", lambda model: model[2].bias.detach().add_(1))

    def test_replaced_memory(self):
        def replace(model):
            model[0].bias.data = torch.zeros(32)

        self.refused(critic(), "changed", replace)


class _Normalised(nn.Module):
    """Keeps the statistics of batches as parameters that need no gradient; takes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        both = torch.zeros(8), torch.ones(8)
        self.statistics = nn.ParameterList([nn.Parameter(t, requires_grad=False) for t in both])

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x @ weight, *self.statistics, training=True)

    def parameters(self, *_: object) -> nn.ParameterList:  # type: ignore[override]
        return nn.ParameterList([self.weight])


def test_what_a_forward_writes_into_parameters_is_written_once() -> None:
    """Meta-learning with batch norm; also a class with a `parameters` of its own is fitted."""

    def trained(budget: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = _Normalised()
        sgd = torch.optim.SGD([net.weight], lr=0.1)
        if budget is not None:
            tightfit.fit(net, budget, optimizer=sgd, cache=False)
        for _ in range(3):
            loss = net(torch.randn(16, 8), net.weight).pow(3).mean()
            (slope_,) = torch.autograd.grad(loss, [net.weight], create_graph=True)
            after = net(torch.randn(16, 8), net.weight - 0.1 * slope_).pow(3).mean()
            sgd.zero_grad()
            after.backward()
            sgd.step()
        return [net.weight.detach(), *(s.detach() for s in net.statistics)]

    assert all(map(torch.equal, trained(None), trained("1MiB")))


def test_statistics_of_a_batch_change_without_a_new_version() -> None:
    """As in plain PyTorch, which may have kept them for the backward of another call."""
    norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    tightfit.fit(norm, "1MiB", cache=False)
    own = norm[1].running_mean, norm[1].num_batches_tracked
    before = [t._version for t in own]
    norm(torch.randn(16, 8)).sum().backward()
    assert own[0].abs().sum() > 0
    assert [t._version - v for t, v in zip(own, before, strict=True)] == [0, 1]


def test_statistics_that_change_before_a_backward_reads_them_are_noticed() -> None:
    """A call in evaluation, then one in training: plain PyTorch's gradients, or an error."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    fitted = tightfit.fit(copy.deepcopy(plain), "1MiB", cache=False, in_flight=2)
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    gradients = []
    for net in (plain, fitted):
        seen = net.eval()(x)
        trained = net.train()(y)
        (seen.square().sum() + trained.square().sum()).backward()
        gradients.append(net[0].weight.grad)
    assert torch.equal(*gradients)
