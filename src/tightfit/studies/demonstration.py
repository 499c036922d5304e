"""A demonstration: well-known models trained at several budgets, compared with plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tightfit.progress import SILENT, Progress
from tightfit.studies.comparison import Comparison, Proof
from tightfit.studies.workload import with_loss_inside
from tightfit.zoo import make


@dataclass(frozen=True)
class DemonstratedModel:
    """A model of the zoo and its budgets."""

    name: str
    ratios: tuple[float, ...]  # of eager's activation peak, on top of the constants
    settings: Mapping[str, Any] = field(default_factory=dict)  # keywords of `tightfit.zoo.make`


DEMONSTRATION = (
    DemonstratedModel("resnet50", (0.8, 0.6, 0.45)),
    DemonstratedModel("gpt2", (0.8, 0.7), {"batch": 2}),
)


QUICK = (DemonstratedModel("mobilenet_v2", (0.5,), {"batch": 8, "size": 128}),)
"""Takes half a minute."""


def demonstrate(
    models: Sequence[DemonstratedModel] = DEMONSTRATION,
    *,
    steps: int = 2,
    rounds: int = 2,
    planning_s: float = 5.0,
    progress: Progress = SILENT,
) -> tuple[Proof, ...]:
    """Train each model, its loss planned too, with plain PyTorch and at each budget.

    `steps`: optimizer steps to compare. `rounds`: interleaved timing rounds. `planning_s`: for each
    plan.
    """
    proofs: list[Proof] = []
    progress.start("demonstration", sum(1 + len(model.ratios) for model in models))
    done = 0
    for model in models:
        progress.update(done, f"{model.name} with plain PyTorch")
        torch.manual_seed(0)
        comparison = Comparison(
            with_loss_inside(make(model.name, **model.settings)),
            steps=steps,
            name=model.name,
            progress=progress,
            limits=(planning_s, 0.005),
        )
        done += 1
        for ratio in model.ratios:
            progress.update(done, f"{model.name} at {ratio:.0%} of its activations")
            proofs.append(comparison.at(comparison.budget_of(ratio), rounds=rounds))
            done += 1
    progress.stop()
    return tuple(proofs)
