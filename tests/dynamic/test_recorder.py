"""What a program does is what its log says: names, views, writes in place, ends, bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from support.reference.replay import simulate_in_python
from tightfit.allocator.meter import CpuMeter
from tightfit.cli import main
from tightfit.dynamic.recorder import Recorder
from tightfit.errors import BadInput
from tightfit.eviction.log.instructions import (
    Backward,
    Call,
    Constant,
    Instruction,
    Mutate,
    Release,
    Result,
)
from tightfit.eviction.log.resolve import load_log, resolve
from tightfit.eviction.policies.registry import POLICIES
from tightfit.eviction.simulator import Simulator

ROOT = Path(__file__).parents[2]
LOGS = sorted((ROOT / "benchmarks/logs").glob("*.log.gz"))


def timeless(instructions: list[Instruction]) -> list[Instruction]:
    """The same with all times 1, and operators without namespace and overload."""

    def plain(name: str) -> str:
        return name.split(".")[1]

    return [
        i._replace(time_ns=1, operator=plain(i.operator)) if isinstance(i, Call | Mutate) else i
        for i in instructions
    ]


def test_views_writes_in_place_and_ends_are_written_down() -> None:
    x = torch.ones(4, 2)
    with Recorder() as recorder:
        y = x * 2
        view = y.t()
        z = view.sum()
        y.add_(1)
        del view, z
        w = y.t() + 1
        del y, w
    assert timeless(recorder.instructions()) == [
        Constant("c1", 32),
        Call("mul", ("c1",), (Result("x2", 32),), 1),
        Call("t", ("x2",), (Result("v3", 32, 0),), 1),
        Call("sum", ("v3",), (Result("x4", 4),), 1),
        Mutate("add_", ("x2",), (0,), 1),
        Release("v3"),  # its content is old
        Release("x4"),
        Call("t", ("x2",), (Result("v5", 32, 0),), 1),
        Call("add", ("v5",), (Result("x6", 32),), 1),
        Release("v5"),
        Release("x2"),
        Release("x6"),
    ]


def test_what_autograd_saves_lives_until_its_backward() -> None:
    weight = torch.ones(8, requires_grad=True)
    with Recorder() as recorder:
        loss = (weight.exp() * 3).sum()
        loss.backward()
    instructions = recorder.instructions()
    exp = next(i for i in instructions if isinstance(i, Call) and "exp" in i.operator)
    ended = instructions.index(Release(exp.results[0].name))
    assert instructions.index(Backward()) < ended
    log = resolve(recorder.instructions())
    assert {log.tensors[t].name for t in log.held} >= {"c1"}
    assert weight.grad is not None


def test_the_peak_of_a_log_is_the_measured_one() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(512, 64)
    meter = CpuMeter()
    for _ in range(2):
        optimizer.zero_grad()
        before = meter.live_bytes()
        meter.reset_peak()
        with Recorder() as recorder:
            model(x).square().mean().backward()
        measured = meter.peak_bytes() - before
        optimizer.step()
    log = resolve(recorder.instructions())
    copies = 512 * 64 * 4  # a log writes in place as a copy, old and new at once
    recorded = log.base_peak_bytes - log.constant_bytes
    assert measured - 4096 <= recorded <= measured + copies  # the allocator rounds to 64 bytes


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_shipped_logs_replay_alike_in_core_and_reference(path: Path) -> None:
    simulator = Simulator(load_log(path))
    for name, ratio in (("improved", 0.8), ("h_dtr_eq", 0.85), ("improved_ancestors", 0.9)):
        asked = {"policy": POLICIES[name], "budget_bytes": simulator.budget_at(ratio)}
        found = simulator.simulate(**asked, with_moments=True)
        assert found.status == "ok"
        assert found == simulate_in_python(simulator, **asked)


def test_a_script_is_recorded_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trees that differ from step to step: each step has a log of its own."""
    script = str(ROOT / "examples/train_over_trees.py")
    logs: list[int] = []
    for step in (1, 2):
        path = tmp_path / f"{step}.log.gz"
        assert main(["record", script, "--step", str(step), "-o", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        log = load_log(path)
        assert (found["base_peak_bytes"], found["status"]) == (log.base_peak_bytes, "ok")
        assert log.constant_bytes < log.base_peak_bytes
        logs.append(len(log.operators))
    assert logs[0] != logs[1]


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        ("import torch; torch.ones(2) + 1", ["--step", "2"], "made 0 optimizer steps"),
        ("print('nothing')", [], "no operator ran"),
        ("import sys; sys.exit(sys.argv[1])", ["why not"], "ended with code why not"),
        ("import torch; torch.eye(2).to_sparse()", [], "layout torch.sparse_coo"),
        ("", ["--step", "0"], "count from 1"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    tmp_path: Path, text: str, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert main(["record", str(script), *words, "-o", str(tmp_path / "log")]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


def test_nothing_is_recorded_outside() -> None:
    with pytest.raises(BadInput, match="no operator ran"):
        with Recorder() as recorder:
            pass
        torch.ones(2)
        recorder.instructions()
