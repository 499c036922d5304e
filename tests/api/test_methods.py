"""Methods that train besides the forward, planned like it, in one budget."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from tightfit.allocator.meter import CpuMeter
from tightfit.errors import BadInput
from tightfit.execution.attach import attached_methods


class Agent(nn.Module):
    """Has no forward: two methods share a body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.actor, self.critic = nn.Linear(256, 4), nn.Linear(256, 1)

    def value(self, x):
        return self.critic(self.body(x))

    def judged(self, x, action=None):
        hidden = self.body(x)
        of = torch.distributions.Categorical(logits=self.actor(hidden))
        action = of.sample() if action is None else action
        return action, of.log_prob(action), of.entropy(), self.critic(hidden)


class Coder(nn.Module):
    """An autoencoder whose loops call its halves, or its forward, which calls both."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16))
        self.up = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 64))

    def encode(self, x):
        return self.down(x)

    def decode(self, z):
        return self.up(z)

    def forward(self, x):
        return self.decode(self.encode(x))


def act_and_learn(agent: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        action, before, _, _ = agent.judged(x)
        agent.value(x[:8])
    _, now, entropy, value = agent.judged(x, action)
    return ((before - now).exp() + value.square().mean() - 0.1 * entropy).mean()


def halves(model: Any, x: torch.Tensor) -> torch.Tensor:
    code = model.encode(x)
    return F.mse_loss(model.decode(code + 0.1 * torch.randn_like(code)), x)


def whole_then_halves(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x) + halves(model, x)


def trained(model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for rows in (256, 256, 200, 256):
        loss = loss_of(model, torch.randn(rows, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("kind", "names", "loss_of"),
    [
        (Agent, ("value", "judged"), act_and_learn),
        (Coder, ("encode", "decode"), halves),
        (Coder, ("encode", "decode"), whole_then_halves),
    ],
)
def test_methods_train_within_one_budget(kind, names, loss_of) -> None:
    torch.manual_seed(0)
    model = kind()
    plain = trained(copy.deepcopy(model), loss_of)
    held = sum(p.nbytes for p in model.parameters())
    budget = 5 * held + (3 << 20)
    tightfit.fit(model, budget, methods=names, costs="unit")
    meter = CpuMeter()
    before = meter.live_bytes() - held
    meter.reset_peak()
    assert all(map(torch.equal, plain, trained(model, loss_of)))
    assert meter.peak_bytes() - before <= budget
    assert tightfit.report(model).measured_peak_bytes <= budget


def test_what_the_forward_calls_is_part_of_its_plan() -> None:
    model = tightfit.fit(Coder(), "8MiB", methods=("encode", "decode"), costs="unit")
    model(torch.randn(8, 64)).sum().backward()
    assert not any(method.is_used for method in attached_methods(model).values())
    with torch.no_grad():
        assert model.decode(model.encode(torch.randn(2, 64))).shape == (2, 64)


def test_copies_have_methods_of_their_own_and_files_none() -> None:
    model = tightfit.fit(Coder(), "8MiB", methods="encode", costs="unit")
    model.encode(torch.randn(8, 64)).sum().backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin.encode(torch.randn(8, 64)).sum().backward()
    assert tightfit.report(twin) is not None
    assert twin.encode.__self__ is twin
    other = copy.deepcopy(model)
    assert not attached_methods(other)  # it is fitted when it is called, and holds no other model
    with torch.no_grad():
        loaded = pickle.loads(pickle.dumps(model))
    assert "encode" not in vars(loaded)
    assert "encode" in vars(model)
    tightfit.fit(model, "8MiB", methods="decode", costs="unit")
    assert "encode" not in vars(model)
    tightfit.unfit(model)
    assert not {"forward", "encode", "decode"} & set(vars(model))


@pytest.mark.parametrize("name", ["sideways", "forward", "zero_grad", "down"])
def test_names_of_no_method_are_refused(name: str) -> None:
    model = Coder()
    with pytest.raises(BadInput, match=f"{name!r}.*it has: encode, decode"):
        tightfit.fit(model, "8MiB", methods=["encode", name])
    assert not {"forward", "encode"} & set(vars(model))


def test_methods_that_were_not_named_train_within_the_limit(capsys) -> None:
    torch.manual_seed(0)
    plain, x = Coder(), torch.randn(2048, 64)
    model = tightfit.fit(copy.deepcopy(plain), "16MiB")
    for each in (plain, model):
        each.decode(each.encode(x)).square().mean().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)
    said = capsys.readouterr().err
    assert "The limit holds" in said and "methods=['encode', 'decode']" in said


def test_a_request_of_a_method_that_was_not_named_says_what_to_name() -> None:
    model = tightfit.fit(Coder(), "1MiB")
    says_so = r"No planned call has run yet.*methods=\['encode', 'decode'\] of fit plans these, too"
    with pytest.raises(RuntimeError, match=says_so):
        model.encode(torch.randn(1024, 64))
