"""The largest batch within a budget: verified at the answer, and found by estimate before."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import tightfit
from tightfit.cli import main
from tightfit.errors import BadInput, InfeasibleBudget, PlanMismatch
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan import verify
from tightfit.planners.base import Limits
from tightfit.planners.questions.rescale import extrapolated
from tightfit.studies.dry_step import graph_of

QUICK = {"costs": "flops", "optimizer": "none", "limits": Limits(seconds=1)}


def small(batch=None):
    batch = batch or 4
    layers = [nn.Conv2d(8, 8, 3, padding=1) if i % 2 else nn.Tanh() for i in range(8)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(2048, 3))
    images, classes = torch.randn(batch, 3, 16, 16), torch.randint(0, 3, (batch,))
    return model, nn.functional.cross_entropy, (images,), classes


def uneven(batch=None):
    """Another graph at every batch size."""
    model = nn.Linear(3, 3)

    class Repeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            for _ in range(len(x)):
                x = self.inner(x).tanh()
            return x.sum()

    return Repeats(), None, (torch.ones(batch or 2, 3),), None


def needs(batch: int) -> int:
    graph = graph_of(small, batch=batch, costs="flops", optimizer="none")
    return eager_peak_bytes(graph)


def test_the_answer_is_planned_and_keeps_the_reserve() -> None:
    budget = needs(16)
    found = tightfit.max_batch_size(small, budget=budget, reserve=1 << 10, **QUICK)
    assert found.batch > 16 > found.eager_batch > 0
    assert found.outcome.plan is not None
    verify(found.outcome.plan, found.graph)
    assert found.outcome.peak_bytes <= budget - found.reserve_bytes
    assert found.too_large == found.batch + 1


def test_less_overhead_or_more_reserve_gives_no_larger_batch() -> None:
    budget = needs(16)
    free = tightfit.max_batch_size(small, budget=budget, reserve=0, **QUICK)
    cheap = tightfit.max_batch_size(small, budget=budget, reserve=0, max_overhead=0.0, **QUICK)
    spared = tightfit.max_batch_size(small, budget=budget, reserve=budget // 2, **QUICK)
    assert cheap.eager_batch == 16 <= cheap.batch <= free.batch
    assert cheap.outcome.overhead <= 0.0
    assert spared.batch < free.batch


def test_estimated_graphs_are_those_that_are_captured() -> None:
    def captured(batch: int):
        return graph_of(small, batch=batch, costs="flops", optimizer="none")

    graph = extrapolated(captured(4), captured(8), (4, 8))(32)
    real = captured(32)
    assert eager_peak_bytes(graph) == pytest.approx(eager_peak_bytes(real), rel=1e-3)
    assert [op.target for op in graph.ops] == [op.target for op in real.ops]


def test_a_step_that_depends_on_the_batch_is_captured_at_every_size() -> None:
    with pytest.raises(PlanMismatch, match="another graph at batch 2 than at batch 3"):
        extrapolated(graph_of(uneven, batch=2), graph_of(uneven, batch=3), (2, 3))
    found = tightfit.max_batch_size(uneven, budget=1 << 10, **QUICK)
    assert found.graph.name == "Repeats" and found.batch >= 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": "80%"}, BadInput, "is a percentage"),
        ({"budget": "1GiB", "max_overhead": -0.1}, BadInput, "max_overhead must be a fraction"),
        ({"budget": "1GiB", "reserve": "1GiB"}, BadInput, "leaves nothing of the budget"),
        ({"budget": "1GiB", "batch": 3}, BadInput, "leave out batch"),
        (
            {"budget": "1KiB"},
            InfeasibleBudget,
            r"a batch of 1 fits .*\(the budget of 1.00 KiB less",
        ),
    ],
)
def test_bad_input_is_refused(options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        tightfit.max_batch_size(small, **options, **QUICK)


def test_a_model_that_exists_has_no_batch_to_choose() -> None:
    with pytest.raises(BadInput, match="batch= needs a factory"):
        tightfit.max_batch_size(small(), budget="1GiB", **QUICK)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def factory(batch=None):\n"
        "    x = torch.ones(batch or 4, 64)\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())\n"
        "    return model, torch.nn.functional.mse_loss, (x,), x\n",
        "utf-8",
    )
    words = ["max-batch", f"{path}:factory", "--budget", "256KiB", "--time-limit", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["planned_peak_bytes"] <= found["budget_bytes"] - found["reserve_bytes"]
    assert main(words) == 0
    assert f"a batch of {found['batch']} fits 256.00 KiB" in capsys.readouterr().out
    assert main([*words[:2], "--budget", "1KiB", "--json"]) == 3
