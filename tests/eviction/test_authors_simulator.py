"""The DTR authors' own simulator on their logs, where at hand: every row, every moment."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import pytest

from benchmarks.eviction import POLICY_OF, STALE_SUMS, compared, expected_rows, within_a_percent
from support.logs import DATA
from support.reference.replay import simulate_in_python
from tightfit.eviction.log.resolve import load_log
from tightfit.eviction.policies.registry import POLICIES
from tightfit.eviction.simulator import Simulator

pytestmark = pytest.mark.skipif(
    not (DATA / "dtr_logs").exists(), reason="the authors' logs are not at hand"
)
TRACES = sorted((DATA / "dtr_traces").glob("*.csv"))


@cache
def simulator_of(model: str) -> Simulator:
    return Simulator(load_log(DATA / "dtr_logs" / f"{model}.log.gz"))


@pytest.mark.parametrize("model", ["resnet32", "unet", "transformer", "treelstm"])
@pytest.mark.parametrize("heuristic", [*POLICY_OF])
def test_every_row_is_equal(model: str, heuristic: str) -> None:
    rows = [r for r in expected_rows(DATA) if (r["model"], r["heuristic"]) == (model, heuristic)]
    assert len(rows) == (100 if heuristic == "h_rand" else 10)
    for row in rows:
        differing = compared(row, simulator_of(model))
        if (model, heuristic, row["ratio"]) == STALE_SUMS:
            assert within_a_percent(differing)
        else:
            assert not differing, row


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_every_moment_is_equal(path: Path) -> None:
    model, heuristic, ratio = path.stem.split(".", 2)
    simulator = simulator_of(model)
    found = simulator.simulate(
        POLICIES[POLICY_OF[heuristic]], simulator.budget_at(float(ratio)), with_moments=True
    )
    tensors, storages = simulator.log.tensors, simulator.log.storages
    ours = [
        (
            m.kind,
            m.clock_ns,
            m.operator,
            tensors[m.tensor].name,
            storages[tensors[m.tensor].storage].size_bytes,
            m.memory_bytes,
        )
        for m in found.moments
    ]
    with path.open(newline="") as file:
        theirs = [
            (
                row["event"],
                int(row["clock"]),
                int(row["schedule_index"]),
                row["storage_root_name"],
                int(row["size"]),
                int(row["memory_after"]),
            )
            for row in csv.DictReader(file)
        ]
    assert ours == theirs


@pytest.mark.parametrize("heuristic", ["h_DTR_eq", "h_LRU", "h_MSPS", "h_rand"])
def test_the_reference_finds_what_the_core_finds(heuristic: str) -> None:
    simulator, policy = simulator_of("unet"), POLICIES[POLICY_OF[heuristic]]
    for ratio in (0.3, 0.5, 0.7):
        asked = {"policy": policy, "budget_bytes": simulator.budget_at(ratio), "seed": 3}
        core = simulator.simulate(**asked, with_moments=True)
        assert core == simulate_in_python(simulator, **asked)
