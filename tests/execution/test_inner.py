"""Derivatives by outputs that other outputs of the same call are computed from."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.allocator import measure_peak
from tightfit.errors import TightfitError


class Generator(nn.Module):
    """Returns an image and the latents that each of its layers reads, as StyleGAN2's does."""

    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32))
        self.start = nn.Parameter(torch.randn(1, 32))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.styles = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        latents = self.mapping(z).unsqueeze(1).repeat(1, 3, 1)
        x = self.start.expand(z.shape[0], -1)
        for i, (layer, style) in enumerate(zip(self.layers, self.styles, strict=True)):
            x = layer(x) * (1 + style(latents[:, i])) + 0.1 * torch.randn_like(x)
            x = nn.functional.leaky_relu(x, 0.2)
        return x, latents


class Deep(nn.Module):
    """Returns hidden states, each computed from the one before; one weight is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = self.both(self.first(x).tanh())
        two = self.both(one.tanh())
        return self.last(two), one, two


class Past(nn.Module):
    """What both outputs are computed from goes past one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).tanh()
        hidden = self.second(h)
        return hidden.tanh() + h, hidden


def path_length(model: nn.Module, z: Tensor) -> list[Tensor]:
    """The regularisation of StyleGAN2; the loss also comes to the image."""
    image, latents = model(z)
    noise = torch.randn_like(image)
    (slope,) = torch.autograd.grad((image * noise).sum(), latents, create_graph=True)
    lengths = slope.square().sum(2).mean(1).sqrt()
    ((lengths - lengths.mean().detach()).square().mean() + 0 * image[0, 0]).backward()
    return [lengths.detach()]


def curvature(model: nn.Module, z: Tensor) -> list[Tensor]:
    """A second derivative by the latents, which come into the loss themselves, too."""
    image, latents = model(z)
    (slope,) = torch.autograd.grad(image.square().sum(), latents, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), latents, retain_graph=True)
    (slope.square().sum() + image.sum() + latents.square().sum()).backward()
    return [slope.detach(), second]


def importance(model: nn.Module, z: Tensor) -> list[Tensor]:
    """Grad-CAM for two classes, and then training."""
    image, hidden, *_ = model(z)
    found = [torch.autograd.grad(image[0, i], hidden, retain_graph=True)[0] for i in range(2)]
    (image.square().sum() + hidden.sum()).backward()
    return found


def asked_with_weights(model: nn.Module, z: Tensor) -> list[Tensor]:
    image, hidden, *_ = model(z)
    return [*torch.autograd.grad(image.square().sum(), [hidden, *model.parameters()])]


def kept(model: nn.Module, z: Tensor) -> list[Tensor]:
    outputs = model(z)
    for output in outputs[1:]:
        output.retain_grad()
    sum(output.square().sum() for output in outputs).backward()
    return [output.grad for output in outputs[1:]]


def hooked(model: nn.Module, z: Tensor) -> list[Tensor]:
    """Hooks see whole gradients, and change them."""
    outputs, seen = model(z), []
    for output in outputs[1:]:
        output.register_hook(lambda gradient: seen.append(gradient.clone()))
        output.register_hook(lambda gradient: gradient * 2)
    sum(output.square().sum() for output in outputs).backward()
    return seen


def in_turn(model: nn.Module, z: Tensor) -> list[Tensor]:
    """An ordinary loss between others: its calls go by the plan."""
    found = path_length(model, z) if isinstance(model, Generator) else kept(model, z)
    image, hidden, *_ = model(z)
    (image.square().mean() + hidden.square().mean()).backward()
    return found + kept(model, z)


def trained(model: nn.Module, way: Callable[[nn.Module, Tensor], list[Tensor]]) -> list[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for seed in range(4):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        found += way(model, torch.randn(6, 8))
        found += [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return [*found, *(p.detach() for p in model.parameters())]


def is_same(expected: list[Any], found: list[Any]) -> bool:
    return len(expected) == len(found) and all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(expected, found, strict=True)
    )


OF_ANY = [importance, asked_with_weights, kept, hooked, in_turn]
CASES = [(Generator, path_length), (Generator, curvature)]
CASES += [(made, way) for made in (Generator, Deep) for way in OF_ANY]


@pytest.mark.parametrize(("made", "way"), CASES)
def test_the_bits_of_plain_pytorch(made: type[nn.Module], way: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    plain = made()
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    assert is_same(trained(plain, way), trained(model, way))


def test_an_ordinary_loss_runs_nothing_again(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    plain = Generator()
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)

    def ordinary(model: nn.Module, z: Tensor) -> list[Tensor]:
        image, latents = model(z)
        (image.square().sum() + latents.sum()).backward()
        return [image.detach()]

    assert is_same(trained(plain, ordinary), trained(model, ordinary))
    assert "runs again" not in capsys.readouterr().err


def test_that_a_forward_runs_again_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    path_length(tightfit.fit(Generator(), "1GiB", costs="unit", cache=False), torch.randn(6, 8))
    assert "looks at an output that others are computed from" in capsys.readouterr().err


def test_nothing_outlives_a_call() -> None:
    """A derivative whose loss never goes back holds the call no longer than it lives itself."""
    model = tightfit.fit(Generator(), "1GiB", costs="unit", cache=False)
    gc.collect()
    gc.disable()
    try:
        for create_graph in (False, True):
            image, latents = model(torch.randn(6, 8))
            (slope,) = torch.autograd.grad(image.sum(), latents, create_graph=create_graph)
            alive = weakref.ref(image.grad_fn)
            del image, latents, slope
            assert alive() is None
    finally:
        gc.enable()


def test_it_keeps_to_the_budget() -> None:
    torch.manual_seed(0)
    plain = Generator()
    z = torch.randn(4096, 8)

    def steps(model: nn.Module) -> list[Any]:
        found: list[Any] = []
        for seed in range(3):
            torch.manual_seed(seed)
            model.zero_grad()
            found += [*path_length(model, z), *(p.grad.clone() for p in model.parameters())]
        return found

    expected, measured = measure_peak(lambda: steps(plain), device="cpu")
    budget_bytes = int(1.4 * measured.peak_bytes)
    model = tightfit.fit(copy.deepcopy(plain), budget_bytes, costs="unit", cache=False)
    found, fitted = measure_peak(lambda: steps(model), device="cpu")
    tightfit.unfit(model)
    assert is_same(expected, found)
    assert fitted.peak_bytes <= budget_bytes


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class TestRefused:
    """By name, and `tightfit.step` around it is the way out."""

    def test_what_meets_inside(self) -> None:
        plain = Past()
        model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
        x = torch.randn(4, 8)
        for each in (importance_only(plain, x), importance_only(model, x)):
            assert torch.equal(each, importance_only(plain, x))
        with pytest.raises(TightfitError, match=r"meet there.*tightfit\.step"):
            kept(model, x)

    @pytest.mark.parametrize("how", ["by a function of its own", "in place", "a view"])
    def test_what_is_made_unseen(self, how: str) -> None:
        class Model(Past):
            def forward(self, x: Tensor) -> tuple[Tensor, ...]:
                hidden = self.first(x)
                if how == "in place":
                    hidden.mul_(2)
                elif how == "a view":
                    hidden = hidden.view(-1, 2, 4)
                    return self.second(hidden.flatten(1)), hidden, hidden.transpose(1, 2)
                else:
                    hidden = Doubled.apply(hidden)
                return self.second(hidden), hidden

        model = tightfit.fit(Model(), "1GiB", costs="unit", cache=False)
        with pytest.raises(TightfitError, match=r"run again on that output.*tightfit\.step"):
            kept(model, torch.randn(4, 8))

    def test_an_output_that_is_gone(self) -> None:
        model = tightfit.fit(Generator(), "1GiB", costs="unit", cache=False)
        image, latents = model(torch.randn(4, 8))
        latents.register_hook(lambda gradient: gradient)
        del latents
        with pytest.raises(TightfitError, match=r"is gone.*tightfit\.step"):
            image.sum().backward()

    @pytest.mark.parametrize("made", [Past, Generator])
    def test_the_way_out(self, made: type[nn.Module]) -> None:
        def loss(net: nn.Module, z: Tensor) -> Tensor:
            image, hidden = net(z)
            hidden.register_hook(lambda gradient: gradient * 2)
            (slope,) = torch.autograd.grad(image.square().sum(), hidden, create_graph=True)
            return slope.square().sum() + image.sum()

        torch.manual_seed(0)
        plain = made()
        model = copy.deepcopy(plain)
        step = tightfit.step(loss, modules=model, budget="1GiB", costs="unit", cache=False)

        def trains(run: Callable[[nn.Module, Tensor], Tensor]) -> Any:
            def way(net: nn.Module, z: Tensor) -> list[Tensor]:
                found = run(net, z)
                found.backward()
                return [found.detach()]

            return way

        assert is_same(trained(plain, trains(loss)), trained(model, trains(step)))


def importance_only(model: nn.Module, x: Tensor) -> Tensor:
    output, hidden = model(x)
    return torch.autograd.grad(output[0, 0], hidden)[0]
