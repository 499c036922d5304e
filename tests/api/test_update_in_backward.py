"""The optimizer's step inside the plan: bits of the plain loop, gradients freed in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from support.in_backward import OPTIMIZERS
from tightfit.allocator import measure_peak
from tightfit.errors import BadInput, TightfitError
from tightfit.execution.attach import attached
from tightfit.graph.liveness import producers
from tightfit.plan.plan import Compute
from tightfit.session.memory import stretches

STEPS = 20


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(6))
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(words)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.gelu(layer(norm(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Gated(nn.Module):
    """Layers whose gradients read what other layers have made."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        for gate, up in zip(self.gates, self.ups, strict=True):
            x = x + torch.sigmoid(gate(x)) * up(x) * self.scale
        return x.square().mean()


class Convolutions(nn.Module):
    """Convolutions with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *[
                m
                for _ in range(4)
                for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            ],
            nn.Dropout(0.2),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3))).square().mean()


class Deep(nn.Module):
    """Layers with more weights than activations, the first of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(6))
        self.kernels = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm, kernel in zip(self.layers, self.norms, self.kernels, strict=True):
            x = x + nn.functional.gelu(layer(norm(x)))
            x = x + torch.relu(kernel(x.view(-1, 16, 2, 2))).flatten(1)
        return self.layers[0](x).square().mean()


def words() -> tuple[Tensor, ...]:
    return torch.randint(0, 96, (8, 16)), torch.randint(0, 96, (8, 16))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "tied": (Tied, words),
    "gated": (Gated, lambda: (torch.randn(16, 24),)),
    "convolutions": (Convolutions, lambda: (torch.randn(4, 8, 12, 12),)),
}


def least_bytes(
    model: nn.Module, inputs: tuple[Tensor, ...], optimizer: Any, *, in_backward: bool
) -> int:
    """Return the least budget of a copy of a model."""
    own = copy.deepcopy(model)
    mine = OPTIMIZERS[optimizer](own.parameters())
    tightfit.fit(own, "1GiB", optimizer=mine, update_in_backward=in_backward, limits=(2, 0.01))
    return attached(own).smallest_budget(inputs, {}).found_bytes


def trained(
    model: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    draw: Callable[[], tuple[Tensor, ...]],
    scheduler: Any = None,
    steps: int = STEPS,
    clipped: float | None = None,
) -> list[Tensor]:
    """Train; return the losses."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(*draw())
        loss.backward()
        if clipped is not None:
            every = model.parameters()  # type: ignore[attr-defined]
            torch.nn.utils.clip_grad_norm_(every, clipped)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach().clone())
    return losses


def assert_same(one: nn.Module, other: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    own, their = (optimizer.state_dict() for optimizer in optimizers)
    assert own["param_groups"] == their["param_groups"]
    assert own["state"].keys() == their["state"].keys()
    for number, state in own["state"].items():
        assert state.keys() == their["state"][number].keys()
        pairs = ((value, their["state"][number][key]) for key, value in state.items())
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs if a is not None
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_has_the_bits_of_the_plain_loop(kind: str) -> None:
    torch.manual_seed(0)
    plain = Tied()
    fitted = copy.deepcopy(plain)
    budget = int(1.05 * least_bytes(plain, words(), kind, in_backward=True))
    of_plain = OPTIMIZERS[kind](plain.parameters())
    of_fitted = OPTIMIZERS[kind](fitted.parameters())
    expected = trained(plain, of_plain, words)
    tightfit.fit(fitted, budget, optimizer=of_fitted, update_in_backward=True)
    assert all(map(torch.equal, trained(fitted, of_fitted, words), expected))
    assert_same(fitted, plain, of_fitted, of_plain)
    assert all(p.grad is None for p in fitted.parameters())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [1.0, 1.2, 3.0])
def test_a_model_has_the_bits_of_the_plain_loop(name: str, share: float) -> None:
    make, draw = MODELS[name]
    torch.manual_seed(0)
    plain = make()
    fitted = copy.deepcopy(plain)
    budget = int(share * least_bytes(plain, draw(), "AdamW", in_backward=True)) + 4096
    of_plain, of_fitted = (OPTIMIZERS["AdamW"](m.parameters()) for m in (plain, fitted))
    expected = trained(plain, of_plain, draw)
    tightfit.fit(fitted, budget, optimizer=of_fitted, update_in_backward=True)
    assert all(map(torch.equal, trained(fitted, of_fitted, draw), expected))
    assert_same(fitted, plain, of_fitted, of_plain)


@pytest.mark.parametrize("kind", ["AdamW", "SGD with momentum"])
def test_groups_a_scheduler_and_the_loss_inside(kind: str) -> None:
    torch.manual_seed(0)
    plain = Gated()
    fitted = copy.deepcopy(plain)

    def made(model: Gated) -> tuple[torch.optim.Optimizer, Any]:
        groups = [
            {"params": [*model.gates.parameters()], "lr": 0.02, "weight_decay": 0.1},
            {"params": [*model.ups.parameters(), model.scale]},
        ]
        optimizer = OPTIMIZERS[kind](groups)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)

    draw = MODELS["gated"][1]
    of_plain, of_fitted = made(plain), made(fitted)
    expected = trained(lambda x: 3 * plain(x), of_plain[0], draw, of_plain[1], STEPS - 1)

    def loss_of(x: Tensor) -> Tensor:
        return 3 * fitted(x)

    step = tightfit.step(
        loss_of,
        modules=fitted,
        budget="200KiB",
        optimizer=of_fitted[0],
        update_in_backward=True,
        cache=False,
    )
    losses = trained(step, of_fitted[0], draw, of_fitted[1], STEPS - 1)
    assert all(map(torch.equal, losses, expected))
    assert_same(fitted, plain, of_fitted[0], of_plain[0])


def test_parameters_of_no_optimizer_and_inputs_have_their_gradients() -> None:
    torch.manual_seed(0)
    plain = Gated()
    fitted = copy.deepcopy(plain)
    x = torch.randn(16, 24)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    of_plain, of_fitted = (torch.optim.SGD(m.gates.parameters(), 0.1) for m in (plain, fitted))
    plain(theirs).backward()
    of_plain.step()
    tightfit.fit(fitted, "1MiB", optimizer=of_fitted, update_in_backward=True, cache=False)
    fitted(mine).backward()
    of_fitted.step()
    assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    for one, other in zip(fitted.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    for up, other in zip(fitted.ups.parameters(), plain.ups.parameters(), strict=True):
        assert torch.equal(up.grad, other.grad)  # type: ignore[arg-type]
    assert all(p.grad is None for p in fitted.gates.parameters())


def test_its_peak_is_without_the_gradients() -> None:
    def peak(*, in_backward: bool) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(128, 128), nn.Tanh())])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        tightfit.fit(
            model, "64MiB", optimizer=optimizer, update_in_backward=in_backward, cache=False
        )
        x = torch.randn(16, 128)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return measure_peak(step, device="cpu")[1].peak_bytes

    gradients = 12 * (128 * 128 + 128) * 4
    saved = peak(in_backward=False) - peak(in_backward=True)
    assert saved > 0.7 * gradients


class Global(torch.optim.SGD):
    """An optimizer that steps by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad / norm, alpha=0.1)


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=1 / group["k"])


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.LBFGS,
        lambda p: Global(p, 0.1),
        lambda p: Counting(p, 0.1),
        lambda p: None,
    ],
    ids=["lbfgs", "global", "counting", "none"],
)
def test_an_optimizer_that_cannot_step_in_backward_is_refused(make: Callable[[Any], Any]) -> None:
    model = Gated()
    with pytest.raises(BadInput, match="update_in_backward"):
        tightfit.fit(model, "1MiB", optimizer=make(model.parameters()), update_in_backward=True)


@pytest.mark.parametrize(
    "keywords", [{"compile": True}, {"arena": True}, {"methods": "forward"}], ids=str
)
def test_options_incompatible_with_update_in_backward_are_refused(keywords: dict[str, Any]) -> None:
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(BadInput, match="update_in_backward"):
        tightfit.fit(model, "1MiB", optimizer=optimizer, update_in_backward=True, **keywords)
    with pytest.raises(BadInput, match="a Budget"):
        tightfit.fit(model, tightfit.Budget("1MiB"), optimizer=optimizer, update_in_backward=True)


def fitted_gated() -> tuple[Gated, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tightfit.fit(model, "1MiB", optimizer=optimizer, update_in_backward=True, cache=False)
    return model, optimizer, torch.randn(16, 24)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def refused(model: nn.Module, call: Callable[[], Any], match: str) -> None:
    """Expect a refusal that leaves all weights as they are."""
    before = weights(model)
    with pytest.raises(TightfitError, match=match):
        call()
    assert all(map(torch.equal, weights(model), before))


def test_accumulation_is_refused() -> None:
    model, optimizer, x = fitted_gated()
    model(x).backward()
    refused(model, lambda: model(x), "accumulated")
    optimizer.step()
    model(x).backward()
    optimizer.step()
    model.scale.grad = torch.ones(24)
    refused(model, lambda: model(x), "zero_grad")
    model.scale.grad = None
    loss = model(x)
    model.scale.grad = torch.ones(24)
    refused(model, loss.backward, "zero_grad")


def test_hooks_of_gradients_are_refused() -> None:
    model, _, x = fitted_gated()
    handle = model.scale.register_hook(lambda g: 2 * g)
    refused(model, lambda: model(x), "hook")
    handle.remove()
    model(x).backward()


def test_a_scaler_is_refused() -> None:
    model, _, x = fitted_gated()
    scaler = torch.amp.GradScaler("cpu")
    refused(model, lambda: scaler.scale(model(x)).backward(), "GradScaler")


def test_other_backwards_are_refused() -> None:
    model, optimizer, x = fitted_gated()
    some = [model.scale]
    refused(model, lambda: torch.autograd.grad(model(x), some), "autograd.grad")
    refused(model, lambda: model(x).backward(inputs=some), "autograd.grad")
    refused(model, lambda: model(x).backward(create_graph=True), "create_graph")
    loss = model(x)
    loss.backward(retain_graph=True)
    refused(model, loss.backward, "second backward")
    optimizer.step()
    model(x).backward(inputs=list(model.parameters()))


def test_a_learning_rate_that_changes_before_the_step_is_refused() -> None:
    model, optimizer, x = fitted_gated()
    model(x).backward()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(TightfitError, match="settings"):
        optimizer.step()


def test_a_gradient_from_outside_the_plan_is_refused() -> None:
    model, optimizer, x = fitted_gated()
    (model(x) + model.scale.square().sum()).backward()
    with pytest.raises(TightfitError, match="outside the plan"):
        optimizer.step()


def test_an_optimizer_that_has_lost_a_parameter_is_refused() -> None:
    model, optimizer, x = fitted_gated()
    model(x).backward()
    optimizer.step()
    del optimizer.param_groups[0]["params"][-1]
    refused(model, lambda: model(x), "left the optimizer")


def test_several_graphs_are_refused() -> None:
    class Broken(Gated):
        def forward(self, x: Tensor) -> Tensor:
            x = self.gates[0](x)
            torch._dynamo.graph_break()
            return super().forward(x)

    model = Broken()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tightfit.fit(model, "1MiB", optimizer=optimizer, update_in_backward=True, cache=False)
    refused(model, lambda: model(torch.randn(16, 24)), "several graphs")


def test_a_copy_trains_alike_and_unfit_ends_stepping_in_backward() -> None:
    model, optimizer, x = fitted_gated()
    model(x).backward()
    optimizer.step()
    other = copy.deepcopy(model)
    other(x).backward()
    assert all(p.grad is not None for p in other.parameters())
    tightfit.unfit(model)
    model(x).backward()
    assert all(p.grad is not None for p in model.parameters())


class Wide(nn.Module):
    """Parameters of one, two and four dimensions, one of them not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(40_003))
        self.weight = nn.Parameter(torch.randn(401, 501))
        self.kernel = nn.Parameter(
            torch.randn(32, 16, 5, 31).contiguous(memory_format=torch.channels_last)
        )

    def forward(self, x: Tensor) -> Tensor:
        terms = (p.square().sum() for p in self.parameters())
        return sum(terms) * x.mean()  # type: ignore[return-value]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_in_stretches_have_the_same_bits_or_are_not_offered(kind: str) -> None:
    plain = Wide()
    other = copy.deepcopy(plain)
    whole, parts = (OPTIMIZERS[kind](m.parameters()) for m in (plain, other))
    (group,) = parts.param_groups
    offered = [stretches.has_same_bits(parts, group, p) for p in other.parameters()]
    assert offered == [kind != "Adafactor"] * 3
    if not all(offered):
        return
    for _ in range(3):
        for one, p in zip(plain.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            stretches.step_in_stretches(parts, group, p, one.grad.clone(), 1 << 11)
        whole.step()
    assert_same(other, plain, parts, whole)


def test_a_plan_for_little_room_steps_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "STRETCH", 1 << 11)
    torch.manual_seed(0)
    plain = Wide()
    fitted = copy.deepcopy(plain)
    of_plain, of_fitted = (OPTIMIZERS["AdamW"](m.parameters()) for m in (plain, fitted))

    def draw() -> tuple[Tensor, ...]:
        return (torch.rand(8),)

    expected = trained(plain, of_plain, draw, steps=4)
    tightfit.fit(fitted, "64MiB", optimizer=of_fitted, update_in_backward=True, cache=False)
    budget = attached(fitted).smallest_budget(draw(), {}).found_bytes + 4096
    tightfit.fit(fitted, budget, optimizer=of_fitted, update_in_backward=True, cache=False)
    assert all(map(torch.equal, trained(fitted, of_fitted, draw, steps=4), expected))
    assert_same(fitted, plain, of_fitted, of_plain)
    last = attached(fitted).last
    ways = {
        step.alternative
        for step in last.outcome.plan.instructions
        if isinstance(step, Compute) and last.graph.ops[step.op].target == "step.AdamW"
    }
    assert 1 in ways


def computes_gradients_again(model: nn.Module) -> bool:
    """Whether the last plan takes a step with a gradient of the second pass."""
    last = attached(model).last
    ops = {x.op: x.alternative for x in last.outcome.plan.instructions if isinstance(x, Compute)}
    ways = [(last.graph.ops[op], way) for op, way in ops.items()]
    read = {v for op, way in ways if op.changes for v in op.alternatives[way].reads}
    return any(last.graph.values[v].name.endswith(", again") for v in read)


def trained_with_clipping(
    make: Callable[[], nn.Module],
    draw: Callable[[], tuple[Tensor, ...]],
    kind: str,
    max_norm: float,
) -> nn.Module:
    """Train in the least budget, compare with the plain loop; return the fitted model."""
    torch.manual_seed(0)
    plain = make()
    fitted = copy.deepcopy(plain)
    of_plain, of_fitted = (OPTIMIZERS[kind](m.parameters()) for m in (plain, fitted))
    expected = trained(plain, of_plain, draw, clipped=max_norm)
    keywords = {"optimizer": of_fitted, "limits": (2, 0.01), "clip_grad_norm": max_norm}
    tightfit.fit(fitted, "64MiB", **keywords)
    least = attached(fitted).smallest_budget(draw(), {}).found_bytes
    tightfit.fit(fitted, int(1.01 * least) + 4096, **keywords)
    assert all(map(torch.equal, trained(fitted, of_fitted, draw), expected))
    assert_same(fitted, plain, of_fitted, of_plain)
    assert all(p.grad is None for p in fitted.parameters())
    return fitted


@pytest.mark.parametrize(
    ("name", "kind", "max_norm"),
    [
        ("tied", "AdamW", 0.01),
        ("tied", "AdamW", 1e6),
        ("tied", "AdamW, foreach", 0.1),
        ("tied", "Adafactor", 0.1),
        ("gated", "SGD with momentum", 0.01),
        ("convolutions", "AdamW", 0.01),
    ],
)
def test_clipping_has_the_bits_of_the_plain_loop(name: str, kind: str, max_norm: float) -> None:
    trained_with_clipping(*MODELS[name], kind, max_norm)


def test_gradients_are_computed_again_where_clipping_cannot_keep_them() -> None:
    draw = lambda: (torch.randn(4, 64),)  # noqa: E731
    model = trained_with_clipping(Deep, draw, "SGD with momentum", 0.01)
    last = attached(model).last
    ways = {x.op: x.alternative for x in last.outcome.plan.instructions if isinstance(x, Compute)}
    taken = [(last.graph.ops[op], way) for op, way in ways.items()]
    read = {v for op, way in taken if op.changes for v in op.alternatives[way].reads}
    assert any(last.graph.values[v].name.endswith(", again") for v in read)
    kept = last.outcome.peak_bytes - last.graph.constant_bytes
    assert kept < 0.7 * sum(p.nbytes for p in model.parameters())


def test_clipping_some_of_the_gradients_is_refused() -> None:
    model = Gated()
    optimizer = torch.optim.SGD(model.gates.parameters(), 0.1)
    tightfit.fit(model, "1MiB", optimizer=optimizer, clip_grad_norm=1.0, cache=False)
    refused(model, lambda: model(torch.randn(16, 24)), "does not hold")
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    forward = lambda x: mixed[1](mixed[0](x).double()).sum()  # noqa: E731
    step = tightfit.step(
        forward,
        modules=mixed,
        budget="1MiB",
        optimizer=torch.optim.SGD(mixed.parameters(), 0.1),
        clip_grad_norm=1.0,
        cache=False,
    )
    with pytest.raises(BadInput, match="one type"):
        step(torch.randn(4, 4))
    with pytest.raises(BadInput, match="positive"):
        tightfit.fit(model, "1MiB", optimizer=optimizer, clip_grad_norm=0.0)


def test_gradients_that_are_sums_hold_up_no_other_step() -> None:
    model = Tied()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    tightfit.fit(model, "1MiB", optimizer=optimizer, update_in_backward=True, cache=False)
    tightfit.prepare(model, *words())
    graph = attached(model).last.graph
    made = producers(graph)
    steps = [op for op in graph.ops if op.changes]
    assert len(steps) == len(list(model.parameters()))
    assert all(op.id - made[op.alternatives[0].reads[1]] <= 4 for op in steps)
