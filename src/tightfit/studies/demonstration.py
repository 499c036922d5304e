"""A demonstration: well-known models trained at several budgets, compared with plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tightfit.progress import SILENT, Progress
from tightfit.studies.comparison import Comparison, Proof
from tightfit.studies.subject import with_loss_inside
from tightfit.zoo import make


@dataclass(frozen=True)
class Exhibit:
    """A model of the zoo and the budgets it is shown at."""

    model: str  # its name in the zoo
    # Budgets as shares of eager's activation peak, on top of the constants
    ratios: tuple[float, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # keywords of `tightfit.zoo.make`


DEMONSTRATION = (
    Exhibit("resnet50", (0.8, 0.6, 0.45)),
    Exhibit("gpt2", (0.8, 0.7), {"batch": 2}),
)


QUICK = (Exhibit("mobilenet_v2", (0.5,), {"batch": 8, "size": 128}),)
"""Half a minute of it."""


def demonstrate(
    exhibits: Sequence[Exhibit] = DEMONSTRATION,
    *,
    steps: int = 2,
    rounds: int = 2,
    planning_s: float = 5.0,
    progress: Progress = SILENT,
) -> tuple[Proof, ...]:
    """Train each model with plain PyTorch and at each budget; return a proof of every pair.

    A step is planned with its loss.

    `steps`: optimizer steps to compare. `rounds`: interleaved timing rounds. `planning_s`: seconds
    the planner may take for each plan.
    """
    proofs: list[Proof] = []
    progress.start("demonstration", sum(1 + len(exhibit.ratios) for exhibit in exhibits))
    done = 0
    for exhibit in exhibits:
        progress.update(done, f"{exhibit.model} with plain PyTorch")
        torch.manual_seed(0)
        comparison = Comparison(
            with_loss_inside(make(exhibit.model, **exhibit.settings)),
            steps=steps,
            name=exhibit.model,
            progress=progress,
            limits=(planning_s, 0.005),
        )
        done += 1
        for ratio in exhibit.ratios:
            progress.update(done, f"{exhibit.model} at {ratio:.0%} of its activations")
            proofs.append(comparison.at(comparison.budget_of(ratio), rounds=rounds))
            done += 1
    progress.stop()
    return tuple(proofs)
