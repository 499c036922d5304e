"""Proofs: the same steps with and without tightfit, at one budget or several."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit
import tightfit.cli.prove as prove_command
from tightfit.api.prove import prove
from tightfit.errors import BadInput, InfeasibleBudget, NothingToTrain
from tightfit.session.whole import captures as capturing
from tightfit.studies import comparison as proving
from tightfit.studies.bits import largest_difference
from tightfit.studies.comparison import Comparison
from tightfit.zoo import Example


def example() -> Example:
    """Return a small network with BatchNorm and dropout."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        layers += [nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 256, 5))
    images, classes = torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))
    return Example(model, nn.functional.cross_entropy, (images,), classes)


def test_one_comparison_serves_many_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []
    original = capturing.capture_step
    monkeypatch.setattr(
        capturing,
        "capture_step",
        lambda *args, **named: captures.append(args) or original(*args, **named),
    )
    comparison = Comparison(example(), name="small", limits=(1, 0.01))
    budgets = [comparison.budget_of(ratio) for ratio in (0.9, 0.7, 1.5)]
    proofs = [comparison.at(budget, rounds=1) for budget in budgets]
    assert len(captures) == 1
    for budget, proof in zip(budgets, proofs, strict=True):
        assert proof.bitwise and proof.holds and proof.max_relative_difference == 0
        assert proof.budget_bytes == budget
        assert proof.planned_peak_bytes <= budget
        off = abs(proof.measured_program_bytes - proof.planned_peak_bytes)
        assert off <= 0.01 * (proof.planned_peak_bytes - proof.constant_bytes)
        assert len(proof.time_ratios) == 1
    assert proofs[1].measured_peak_bytes < proofs[0].measured_peak_bytes
    with pytest.raises(InfeasibleBudget):
        comparison.at(comparison.eager.constant_bytes + 1)


def test_a_proof_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose planned steps draw other random numbers than eager must not be bitwise."""
    comparison = Comparison(example(), steps=2, limits=(1, 0.01))
    original = proving.train

    def with_other_seed(workload, steps, planned=None):
        monkeypatch.setattr(workload, "seed", 0 if planned is None else 1)
        return original(workload, steps, planned)

    monkeypatch.setattr(proving, "train", with_other_seed)
    proof = comparison.at(comparison.budget_of(0.9), rounds=0)
    assert not proof.bitwise and proof.max_relative_difference > 0
    assert "loss of step 1" in proof.differing
    assert "gradient of 0.weight (first in step 1)" in proof.differing
    assert proof.time_ratio is None


class SelfSeeded(nn.Dropout):
    def forward(self, x):
        torch.seed()
        return super().forward(x)


def test_a_model_that_no_seed_repeats() -> None:
    model = nn.Sequential(nn.Linear(8, 8), tightfit.opaque(SelfSeeded()), nn.Linear(8, 1))
    unrepeatable = Example(model, nn.functional.mse_loss, (torch.randn(64, 8),), torch.ones(64, 1))
    with pytest.raises(BadInput, match=r"other bits each time .* \(first: loss of step 1"):
        prove(unrepeatable, budget_ratio=2.0, steps=2, rounds=0, costs="unit")


class Masking(nn.Linear):
    """Writes into its input, as a mask of a spectrogram does."""

    def forward(self, x):
        x[torch.rand(x.shape[0]) < 0.2] = 0
        return super().forward(x)


def test_inputs_that_a_forward_writes_into_are_put_back() -> None:
    masked = Example(
        Masking(8, 1), nn.functional.mse_loss, (torch.randn(64, 8),), torch.ones(64, 1)
    )
    assert prove(masked, budget="1MiB", steps=2, rounds=0, costs="unit").succeeded


def test_what_prove_refuses() -> None:
    with pytest.raises(BadInput, match="either a budget"):
        prove(example())
    with pytest.raises(BadInput, match="at least 2 steps"):
        prove(example(), budget_ratio=0.5, steps=1)
    with pytest.raises(BadInput, match="neither a loss"):
        prove(example()._replace(loss=None), budget_ratio=0.5)
    with pytest.raises(NothingToTrain):
        prove(example()._replace(model=nn.Flatten()), budget_ratio=0.5)


def test_the_minimum_budget_is_proven() -> None:
    proof = prove(example(), budget="minimum", steps=2, rounds=1, limits=(1, 0.01))
    assert proof.succeeded
    assert proof.minimum_budget_bytes == proof.budget_bytes < proof.eager_peak_bytes
    with pytest.raises(InfeasibleBudget):
        prove(example(), budget=proof.constant_bytes + 1, limits=(1, 0.01))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"budget": "1GiB", "budget_ratio": 0.5}, "either a budget"),
        ({"budget": "80%"}, "is a percentage, not a size"),
        ({"budget_ratio": -0.5}, "ratio must be a positive number such as 0.5, got -0.5"),
        ({"budget_ratio": 0.5, "rounds": -1}, "rounds must not be negative, got -1"),
        ({"budget_ratio": 0.5, "planner": "absent"}, "absent"),
    ],
)
def test_numbers_that_prove_refuses(asked, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        prove(example(), **asked)


@pytest.mark.parametrize(("noise", "planned_noise"), [(1e-6, 1e-6), (1e-6, 1e-3)])
def test_what_plain_pytorch_does_not_repeat_is_compared_within_a_tolerance(
    monkeypatch: pytest.MonkeyPatch, noise: float, planned_noise: float
) -> None:
    """As where sums by index run on several threads: rounded otherwise in every run."""
    original, draw = proving.train, torch.Generator().manual_seed(0)

    def rounding_otherwise(workload, steps, planned=None):
        trace = original(workload, steps, planned)
        size = noise if planned is None else planned_noise
        with torch.no_grad():
            for parameter in workload.model.parameters():
                parameter.mul_(1 + size * torch.rand(parameter.shape, generator=draw))
        trace.digests[-1] = workload.digests()
        return trace

    monkeypatch.setattr(proving, "train", rounding_otherwise)
    comparison = Comparison(example(), steps=2, costs="unit", limits=(1, 0.05))
    proof = comparison.at(comparison.budget_of(1.5), rounds=0)
    assert not proof.bitwise and proof.tolerance is not None
    assert proof.succeeded == proof.is_within_tolerance == (noise == planned_noise)
    assert noise / 2 < proof.tolerance < 20 * noise
    text = prove_command._text(proof)
    assert ("gives other bits each time it is run" in text) == proof.succeeded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class LeavesLayersOut(nn.Module):
    """A stack of blocks of which some are left out, by a number that is drawn for each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if torch.rand([]) > 0.4:
                x = block(x)
        return self.last(x)


class SparseWords(nn.Module):
    """Gradients of words are sparse; the blocks behind them are planned."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16, sparse=True)
        self.blocks = nn.Sequential(Block(), Block(), nn.Linear(16, 1))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.words(words)).mean(1)


QUICK = {"costs": "unit", "cache": False, "limits": (0.1, 0.01)}


@pytest.mark.parametrize("seed", [0])
def test_the_least_budget_counts_layers_that_a_step_leaves_out(seed: int) -> None:
    torch.manual_seed(0)
    inputs, target = torch.randn(64, 8), torch.zeros(64, 1)
    example = Example(LeavesLayersOut(), nn.functional.mse_loss, (inputs,), target)
    proof = prove(lambda: example, budget="minimum", seed=seed, rounds=8, **QUICK)
    assert proof.bitwise and proof.holds


def test_sparse_gradients_are_compared_by_their_indices_and_values() -> None:
    torch.manual_seed(0)
    words, target = torch.randint(0, 20, (8, 6)), torch.randn(8, 1)
    example = Example(SparseWords(), nn.functional.mse_loss, (words,), target)
    proof = prove(lambda: example, budget_ratio=1.0, rounds=0, **QUICK)
    assert proof.bitwise and proof.holds


class Detached(nn.Module):
    """Returns an output and the same without its history."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.layer(x)
        return z, z.detach()


class CarriesLoss(Detached):
    """Returns a view of its loss, and the loss without its history."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.layer(x).square().mean()
        return {"loss": loss.unsqueeze(0), "shown": loss.detach()}


def product(outputs: tuple[torch.Tensor, torch.Tensor], _: object) -> torch.Tensor:
    return (outputs[0] * outputs[1]).sum()


@pytest.mark.parametrize(
    ("kind", "loss"), [(Detached, product), (CarriesLoss, lambda output, _: output["loss"])]
)
def test_the_proven_model_trains_as_with_fit(kind: type[nn.Module], loss) -> None:
    """The loss is outside of the plan, as it does where users fit a model."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 8)
    proof = prove((model, loss, (x,), None), budget="1MiB", rounds=0, **QUICK)
    plain, fitted = copy.deepcopy(model), tightfit.fit(copy.deepcopy(model), "1MiB", **QUICK)
    for each in (plain, fitted):
        loss(each(x), None).backward()
    gradients = [[p.grad for p in each.parameters()] for each in (plain, fitted)]
    is_equal = all(b is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert proof.succeeded == proof.bitwise == is_equal
    assert is_equal or "gradient of layer.bias (first in step 1)" in proof.differing


def test_the_loss_stays_outside_of_the_plan() -> None:
    calls: list[None] = []

    def counted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return nn.functional.cross_entropy(output, target)

    comparison = Comparison(example()._replace(loss=counted), steps=2, costs="unit", cache=False)
    proof = comparison.at(comparison.budget_of(0.9), rounds=0)
    assert proof.succeeded and len(calls) % 2 == 0 and len(calls) >= 4
    assert "forward" not in vars(comparison.workload.model)


def test_a_step_is_proven_as_that_step() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 16), nn.Linear(16, 1)
    calls: list[None] = []

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return second(first(x).tanh()).square().mean()

    modules = {"first": first, "second": second}
    step = tightfit.step(loss_of, modules=modules, budget="1MiB", **QUICK)
    inputs = (torch.randn(32, 8),)
    proof = prove((step, None, inputs, None), budget="1MiB", steps=3, rounds=0, **QUICK)
    assert proof.succeeded and proof.model == "loss_of"
    assert len(calls) == 6  # Dynamo does what Python does to a list, in every step
    with pytest.raises(BadInput, match=r"tightfit\.step, which can be proven only"):
        tightfit.check((step, None, inputs, None), budget="1MiB")


def test_what_a_factory_has_fitted_is_compared_with_the_plain_model() -> None:
    torch.manual_seed(0)
    model = tightfit.fit(Detached(), "1MiB", **QUICK)
    x = torch.randn(4, 8)
    plain = prove((Detached(), product, (x,), None), budget="1MiB", rounds=0, **QUICK)
    fitted = prove((model, product, (x,), None), budget="1MiB", rounds=0, **QUICK)
    assert fitted.succeeded == plain.succeeded


def test_a_model_that_trains_nothing_is_not_proven() -> None:
    def without_effect(output: torch.Tensor, _: object) -> torch.Tensor:
        return (0 * output).sum()

    with pytest.raises(NothingToTrain, match="no parameter of Linear moves"):
        prove((nn.Linear(8, 1), without_effect, (torch.randn(4, 8),), None), budget="1MiB", **QUICK)


def test_a_gradient_that_only_one_has_differs_without_limit() -> None:
    one = {"gradient of w": torch.ones(2), "parameter w": torch.ones(2)}
    assert largest_difference(one, dict(one)) == 0
    assert largest_difference(one, {"parameter w": torch.ones(2)}) == float("inf")
