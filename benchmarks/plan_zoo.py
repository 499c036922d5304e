"""Plans of the zoo at several budgets, small enough to be kept in the repository.

``python benchmarks/plan_zoo.py`` writes ``plans/MODEL.json.gz`` anew: one file a model, one plan a
ratio of the activation peak, costs by the roofline of a CPU, default settings. `tightfit cache
import` takes them in; tests verify each against the model as it is captured now.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tightfit.graph.ir import Graph
from tightfit.graph.liveness import budget_of_ratio
from tightfit.plan.cache import CachedPlan, plan_key
from tightfit.plan.shared import save_shared
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.studies.dry_step import graph_of
from tightfit.version import __version__

FOLDER = Path(__file__).parents[1] / "plans"
MODELS = ("resnet50", "mobilenet_v2", "unet", "googlenet", "gpt2", "bert")
RATIOS = (0.8, 0.6, 0.5, 0.4)
LIMITS = Limits(seconds=20.0)


def planned(graph: Graph, ratio: float) -> CachedPlan | None:
    """Return the plan of a step at a share of its activation peak; None if none was found."""
    budget = budget_of_ratio(graph, ratio, gradients="fresh")
    task = Task(graph=graph, budget_bytes=budget, gradients="fresh")
    outcome = plan_with(DEFAULT, task, LIMITS)
    if outcome.plan is None:
        return None
    asked = {"gradients": "fresh", "planner": DEFAULT, "limits": LIMITS}
    return CachedPlan(outcome=outcome, key=plan_key(graph, budget_bytes=budget, **asked))


def main(models: tuple[str, ...]) -> None:
    """Write the files of the named models."""
    FOLDER.mkdir(exist_ok=True)
    for name in models:
        graph = graph_of(f"zoo:{name}")
        plans = [plan for ratio in RATIOS if (plan := planned(graph, ratio)) is not None]
        path = FOLDER / f"{name}.json.gz"
        save_shared(path, plans, made_with=f"tightfit {__version__}, torch {torch.__version__}")
        costs = ", ".join(f"{plan.outcome.overhead:+.1%}" for plan in plans)
        print(f"{path.name}: {path.stat().st_size} bytes; extra compute {costs}", flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or MODELS)
