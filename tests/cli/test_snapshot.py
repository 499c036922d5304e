"""``tightfit snapshot``: files that PyTorch's memory viewer and Perfetto open."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from support.graphs import compute_lists, training_graphs, two_layers
from tightfit.cli import main
from tightfit.cli.views.snapshot import snapshot
from tightfit.graph.io import save_graph
from tightfit.graph.ir import Graph
from tightfit.plan import assemble, simulate
from tightfit.plan.assemble import keep_everything
from tightfit.plan.io import save_plan
from tightfit.plan.plan import Compute, Plan


def files(folder: Path, graph: Graph, computes: list[Compute]) -> tuple[str, str, Plan]:
    """A plan file and its graph file."""
    plan = assemble(graph, computes, budget_bytes=1 << 30)
    paths = folder / "plan.json", folder / "graph.json"
    save_plan(plan, paths[0])
    save_graph(graph, paths[1])
    return str(paths[0]), str(paths[1]), plan


def replayed(content: dict[str, Any]) -> int:
    """Follow the events, every address checked; return the most bytes alive."""
    alive: dict[int, int] = {}
    most = 0
    (events,) = content["device_traces"]
    assert [e["time_us"] for e in events] == sorted(e["time_us"] for e in events)
    for event in events:
        first, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert all(end <= start or start + size <= first for start, size in alive.items())
            alive[first] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(first) == event["size"]
        most = max(most, sum(alive.values()))
    at_the_end: dict[int, int] = {}
    for segment in content["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
            if block["state"] == "active_allocated":
                at_the_end[block["address"]] = block["size"]
        assert address == segment["address"] + segment["total_size"]
    assert at_the_end == alive
    return most


def test_pytorchs_viewer_reads_the_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file, graph_file, plan = files(tmp_path, two_layers(), keep_everything(two_layers()))
    output = tmp_path / "plan.pickle"
    assert main(["snapshot", plan_file, graph_file, "-o", str(output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    peak = simulate(two_layers(), plan).peak_bytes
    assert found["planned_peak_bytes"] == peak <= found["height_bytes"]
    content = pickle.loads(output.read_bytes())
    assert replayed(content) == peak
    assert "op 0 aten.mm in first" in str(content["device_traces"])
    assert "segments: 2" in _memory_viz.segsum(content)
    assert _memory_viz.trace(content).count("cudaMalloc") == 2
    for page in (_memory_viz.trace_plot(content), _memory_viz.segment_plot(content)):
        assert "MemoryViz" in page
    lines = _memory_viz.memory(content, format_flamegraph=lambda text: text)
    assert "parameters" in lines


@given(st.data())
@settings(max_examples=30)
def test_a_snapshot_says_what_the_plan_does(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    graph = data.draw(training_graphs())
    folder = tmp_path_factory.mktemp("drawn")
    plan_file, graph_file, plan = files(folder, graph, data.draw(compute_lists(graph)))
    result = simulate(graph, plan)
    assert snapshot(Path(plan_file), graph_file, output=folder / "a.pickle") == 0
    assert replayed(pickle.loads((folder / "a.pickle").read_bytes())) == result.peak_bytes
    assert snapshot(Path(plan_file), graph_file, output=folder / "a.json") == 0
    events = json.loads((folder / "a.json").read_bytes())["traceEvents"]
    alive = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "alive"]
    computes = [step for step in plan.instructions if isinstance(step, Compute)]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(computes) and max(alive, default=0) <= result.peak_bytes
    assert sum(e["dur"] for e in slices) == pytest.approx(1e6 * result.cost_s)
    for lane in {e["tid"] for e in slices}:
        mine = [e for e in slices if e["tid"] == lane]
        for one, following in pairwise(mine):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-3


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", "plan.json", "graph.json", "-o", str(tmp_path / "plan.html")]) == 2
    assert "must end in .pickle" in capsys.readouterr().err
