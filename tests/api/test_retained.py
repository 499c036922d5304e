"""Several backwards through one forward (retain_graph): the forward runs again for each."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from benchmarks.training_loops import Run, live
from support.lives import assert_trained_alike
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.capture.updates import decided_by_updates
from tightfit.errors import TightfitError


class TwoHeads(nn.Module):
    """A trunk that draws and keeps statistics, and two heads."""

    def __init__(self, dropout: float = 0.2, norm: bool = True) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(32, 64),
            nn.BatchNorm1d(64) if norm else nn.LayerNorm(64),
            nn.GELU(),
            nn.Dropout(dropout),
            *[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())],
        )
        self.heads = nn.ModuleList(nn.Linear(64, width) for width in (5, 3))

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.trunk(x)
        return [head(hidden) for head in self.heads]


Backward = Callable[[nn.Module, list[Tensor]], None]


def one_after_the_other(model: nn.Module, losses: list[Tensor]) -> None:
    losses[0].backward(retain_graph=True)
    losses[1].backward()


def more_than_needed(model: nn.Module, losses: list[Tensor]) -> None:
    sum(losses, torch.zeros(())).backward(retain_graph=True)


def the_same_thrice(model: nn.Module, losses: list[Tensor]) -> None:
    loss = losses[0] + losses[1]
    for last in (False, False, True):
        loss.backward(retain_graph=not last)


def projected(model: nn.Module, losses: list[Tensor]) -> None:
    """Take the gradient of each task on the trunk, as gradient surgery does, then that of all."""
    shared = list(model.trunk.parameters())
    of_tasks = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
    (losses[0] + losses[1]).backward()
    for parameter, one, other in zip(shared, *of_tasks, strict=True):
        parameter.grad.sub_(torch.minimum(one * other, torch.zeros(())))


def balanced(model: nn.Module, losses: list[Tensor]) -> None:
    """Weigh tasks by the norms of their gradients on what they share, as GradNorm does."""
    shared = model.trunk[0].weight
    norms = [torch.autograd.grad(loss, shared, retain_graph=True)[0].norm() for loss in losses]
    (losses[0] / norms[0] + losses[1] / norms[1]).backward()


WAYS: list[Backward] = [
    one_after_the_other, more_than_needed, the_same_thrice, projected, balanced,
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm", [False, True], ids=["no buffers", "running statistics"])
@pytest.mark.parametrize("dropout", [0.0, 0.2], ids=["no draws", "dropout"])
@pytest.mark.parametrize("backward", WAYS, ids=lambda way: way.__name__)
def test_every_backward_has_the_bits_of_plain_pytorch(
    backward: Backward, dropout: float, norm: bool
) -> None:
    def trained(run: Run) -> None:
        model = TwoHeads(dropout, norm)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run.fit(model)
        for _ in range(run.steps):
            outputs = model(torch.randn(128, 32))
            losses = [F.cross_entropy(y, torch.randint(y.shape[1], (128,))) for y in outputs]
            optimizer.zero_grad()
            backward(model, losses)
            optimizer.step()
            run.note(losses[0] + losses[1], torch.rand(1).item())
            del outputs, losses
        run.trained(model)

    plain = live(trained, Run(None, steps=4, small=True, costs="unit"))
    fitted = live(trained, Run(plain.whole_bytes, steps=4, small=True, costs="unit"))
    assert_trained_alike(plain, fitted)


@pytest.mark.parametrize("share", [1.0, 0.8])
@pytest.mark.parametrize("way", [balanced, projected], ids=lambda way: way.__name__)
def test_gradients_that_are_there_at_the_forward_keep_nothing_from_a_second_backward(
    way: Backward, share: float
) -> None:
    def trained(run: Run) -> None:
        model = TwoHeads()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run.fit(model, optimizer=optimizer)
        for step in range(run.steps):
            losses = [y.square().mean() for y in model(torch.randn(128, 32))]
            if step % 3 == 2:
                optimizer.zero_grad()  # else they are added up, or there until after the forward
            way(model, losses)
            optimizer.step()
            run.note(losses[0] + losses[1], torch.rand(1).item())
            del losses
        run.trained(model)

    plain = live(trained, Run(None, steps=6, small=True, costs="unit"))
    fitted = live(trained, Run(int(share * plain.whole_bytes), steps=6, small=True, costs="unit"))
    assert_trained_alike(plain, fitted)


class Averaged(nn.Module):
    """Adds what it has seen: it reads the buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.inner(x + self.seen)


class Prepared(nn.Module):
    """Sets itself up by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready.fill_(1)
        return self.inner(x)


def test_what_reads_the_buffers_it_writes_is_refused_by_name() -> None:
    model = tightfit.fit(Averaged(), "1GiB", costs="unit", cache=False)
    loss = model(torch.randn(8, 4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(
        TightfitError, match=r"writes model.seen and reads it.*Call the model again"
    ):
        loss.backward()


def test_what_decides_by_what_it_writes_may_be_differentiated_twice() -> None:
    torch.manual_seed(0)
    plain = Prepared()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    given = torch.randn(8, 4)
    found: list[list[Tensor]] = []
    for model in (plain, fitted):
        loss = model(given).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Words(nn.Module):
    """Its first layer has gradients that no plan holds."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, sparse=True)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.words(x))


def test_a_model_of_several_graphs_has_the_same_bits() -> None:
    torch.manual_seed(0)
    plain = Words()
    found: list[list[Tensor]] = []
    for model in (plain, tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)):
        loss = model(torch.arange(8)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad.to_dense() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


def test_a_parameter_changed_between_two_backwards_is_refused() -> None:
    model = tightfit.fit(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "1GiB", costs="unit")
    loss = model(torch.randn(8, 4)).sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(TightfitError, match="was changed since the call"):
        loss.backward()


def test_a_call_of_which_no_further_backward_came_is_planned_as_others() -> None:
    """The second of two calls is differentiated twice, the first once."""
    plain = TwoHeads()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    found: list[list[Tensor | None]] = []
    for model in (plain, fitted):
        torch.manual_seed(0)
        once, twice = (sum(y.square().mean() for y in model(torch.randn(8, 32))) for _ in range(2))
        once.backward()
        twice.backward(retain_graph=True)
        twice.backward()
        found.append([p.grad for p in model.parameters()] + [torch.rand(1)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)  # pyright: ignore


@pytest.mark.parametrize(
    "module, decided",
    [
        (nn.BatchNorm1d(4), []),
        (nn.BatchNorm1d(4, momentum=None), []),
        (nn.BatchNorm1d(4).eval(), []),
        (Averaged(), ["m.seen"]),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), None),
    ],
    ids=["batch norm", "cumulative", "in eval mode", "read", "spectral norm"],
)
def test_which_buffers_decide_more_than_their_own_update(
    module: nn.Module, decided: list[str] | None
) -> None:
    given = torch.randn(8, 4)
    found = decided_by_updates(capture(TracedCall(module, {"m": module}, (given,), {})).joint)
    assert bool(found) if decided is None else found == decided
