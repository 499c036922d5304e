"""What a plan promises is what the allocator gives out, to the byte."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from benchmarks.training import let_search_end
from support.layouts import OnePixel, TransposedNorm
from tightfit.alternatives.norms import from_output as norm_from_output
from tightfit.studies.comparison import Comparison
from tightfit.zoo import Example

LOSS_GRADIENT_BYTES = 64  # counted the whole step, though a peak in the forward comes before it


@pytest.mark.parametrize(
    ("model", "shape"), [(TransposedNorm, (4, 24, 16)), (OnePixel, (4, 3, 6, 6))]
)
def test_layouts_and_sizes_are_those_of_kernels(model, shape):
    torch.manual_seed(0)
    example = Example(model().train(), None, (torch.randn(shape),), None)
    comparison = Comparison(example, steps=2, costs="unit", cache=False)
    for budget in (comparison.budget_of(0.95), comparison.smallest_budget().found_bytes):
        proof = comparison.at(budget, rounds=0)
        assert proof.bitwise and proof.holds
        off = proof.planned_peak_bytes - proof.measured_program_bytes
        assert off in (0, LOSS_GRADIENT_BYTES)


class LanguageModel(nn.Module):
    """A loss over a large vocabulary behind one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 4000, bias=False)

    def forward(self, x, classes):
        return F.cross_entropy(self.head(torch.tanh(self.layer(x))), classes)


def test_logits_that_are_never_whole_give_the_gradients_within_rounding():
    """The budget has room for a fifth of the logits; without `exactness` no plan fits."""
    torch.manual_seed(0)
    model, x, classes = LanguageModel(), torch.randn(600, 16), torch.randint(0, 4000, (600,))
    loss = model(x, classes)
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    options = {"costs": "unit", "cache": False, "limits": (1.0, 0.1)}
    for exactness in ("bitwise", "rounding"):
        model.zero_grad()
        tightfit.fit(model, "3MiB", exactness=exactness, **options)
        if exactness == "bitwise":
            with pytest.raises(tightfit.InfeasibleBudget):
                model(x, classes)
            tightfit.unfit(model)
    ours = model(x, classes)
    ours.backward()
    torch.testing.assert_close(ours, loss)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


class Images(nn.Module):
    """Layers behind which each of Gist's encodings applies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(16 * 64, 5),
        )

    def forward(self, x, classes):
        return F.cross_entropy(self.layers(x), classes)


def losses_of(model, x, classes):
    """Losses of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x, classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(("planner", "mebibytes"), [("gist", 2.0), ("anytime", 1.4)])
def test_training_with_values_kept_as_halves_is_near_plain_training(planner, mebibytes):
    torch.manual_seed(0)
    plain, ours = Images(), Images()
    ours.load_state_dict(plain.state_dict())
    data = torch.randn(16, 3, 16, 16), torch.randint(0, 5, (16,))
    expected = losses_of(plain, *data)
    options = {"costs": "unit", "cache": False, "limits": (1.0, 0.1)}
    tightfit.fit(ours, f"{mebibytes}MiB", planner=planner, exactness="lossy", **options)
    torch.testing.assert_close(losses_of(ours, *data), expected, rtol=2e-3, atol=2e-3)
    report = tightfit.report(ours)
    assert report.measured_peak_bytes <= report.budget_bytes


class Normalised(nn.Module):
    """Layers behind each of which a norm of one kind stands."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(6))
        self.norms = nn.ModuleList(norm() for _ in range(6))

    def forward(self, x, classes):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return F.cross_entropy(x.mean((2, 3)), classes)


NORMS = {
    "batch_norm": lambda: nn.BatchNorm2d(8),
    "layer_norm": lambda: nn.LayerNorm((8, 16, 16)),
    "group_norm": lambda: nn.GroupNorm(2, 8),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_train_from_their_outputs_until_a_weight_is_near_zero(name, monkeypatch):
    """Where two weights become zero the step is captured again, and that norm runs otherwise."""
    used = []
    function = getattr(norm_from_output, f"gradients_of_{name}")
    of = inspect.signature(function)

    def noted(*args):
        used.append(of.bind(*args).arguments["weight"].data_ptr())
        return function(*args)

    def six_steps(model):
        """The losses; the weights whose gradients came from an output in the last three."""
        first = losses_of(model, *data)
        used.clear()
        return torch.cat([first, losses_of(model, *data)]), set(used)

    monkeypatch.setattr(norm_from_output, f"gradients_of_{name}", noted)
    torch.manual_seed(0)
    plain, ours = Normalised(NORMS[name]), Normalised(NORMS[name])
    ours.load_state_dict(plain.state_dict())
    data = torch.randn(16, 8, 16, 16), torch.randint(0, 5, (16,))
    expected = [six_steps(plain)[0]]
    options = {"costs": "unit", "cache": False, "limits": (2.0, 0.0)}
    plain.zero_grad()
    tightfit.fit(ours, "1.7MiB", exactness="rounding", **options)
    first, before = six_steps(ours)
    weak = next(i for i, norm in enumerate(ours.norms) if norm.weight.data_ptr() in before)
    ours.norms[weak].weight.data.flatten()[:2] = 0.0
    second, after = six_steps(ours)
    assert after
    assert ours.norms[weak].weight.data_ptr() not in after
    tightfit.unfit(ours)
    plain.norms[weak].weight.data.flatten()[:2] = 0.0
    expected.append(six_steps(plain)[0])
    torch.testing.assert_close([first, second], expected, rtol=1e-4, atol=1e-5)


def test_a_report_says_what_the_next_class_would_gain_and_changes_nothing(tmp_path):
    torch.manual_seed(0)
    model = Normalised(NORMS["batch_norm"])
    x, classes = torch.randn(16, 8, 16, 16), torch.randint(0, 5, (16,))
    options = {"costs": "unit", "cache": False, "limits": (3.0, 0.0)}
    first, found = {}, {}
    for exactness in ("lossy", "rounding", "bitwise"):
        tightfit.fit(model, "1.7MiB", exactness=exactness, **options)
        with pytest.raises(tightfit.BadInput, match=r"run a step|nothing is planned"):
            tightfit.report(model, next_exactness=True)
        loss = model(x, classes)
        with pytest.raises(tightfit.BadInput, match=r"no class is|between two steps"):
            tightfit.report(model, next_exactness=True)
        loss.backward()
        first[exactness] = tightfit.report(model)
        let_search_end()
        model(x, classes).backward()
        found[exactness] = tightfit.report(model)
    report = tightfit.report(model, next_exactness=True)
    assert report.next_exactness.exactness == "rounding"
    assert report.next_exactness.overhead <= first["rounding"].overhead
    assert max(report.next_exactness.overhead, found["rounding"].overhead) < report.overhead
    assert report.next_exactness.sentence in str(report)
    assert "exactness rounding a plan" in report.html(tmp_path / "page.html").read_text("utf-8")
    assert tightfit.report(model) == found["bitwise"]
