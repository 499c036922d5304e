"""The plans in ``plans/`` fit the models of the zoo as they are captured now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tightfit.plan import simulate, verify
from tightfit.plan.shared import load_shared
from tightfit.studies.dry_step import graph_of

FILES = sorted((Path(__file__).parents[2] / "plans").glob("*.json.gz"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_the_plans_of_a_model_verify(file: Path) -> None:
    found = load_shared(file)
    made_with = found.made_with.rpartition(" ")[2].partition("+")[0]
    if made_with != torch.__version__.partition("+")[0]:
        pytest.skip(f"the plans were made of what PyTorch {made_with} traces")
    graph = graph_of(f"zoo:{file.name.partition('.')[0]}")
    assert len(found.plans) >= 3
    for entry in found.plans:
        plan = entry.outcome.plan
        assert plan is not None
        verify(plan, graph)
        assert simulate(graph, plan).peak_bytes <= plan.budget_bytes


def test_the_files_are_small() -> None:
    assert len(FILES) >= 6 and sum(file.stat().st_size for file in FILES) < 1 << 20
