"""Commands on files: what they print, their exit codes, and that they need no PyTorch."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from support.commands import every_command
from support.documents import example_of
from support.graphs import two_layers
from tightfit.cli import main
from tightfit.cli.app import app
from tightfit.graph.io import save_graph
from tightfit.plan.io import load_plan

KEYS = {
    "status",
    "budget_bytes",
    "constant_bytes",
    "planned_peak_bytes",
    "overhead",
    "bound",
    "gap",
    "minimum_budget_bytes",
    "seconds",
}
NEEDED = 4600  # bytes of the peak of two_layers, which nothing can lower


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.json"
    save_graph(two_layers(), path)
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out)


def test_the_help_of_every_command_has_examples_that_parse() -> None:
    for name, command in every_command():
        block = command.help.partition("```sh\n")[2].partition("```")[0]
        examples = [line.partition("#")[0].strip() for line in block.splitlines()]
        assert any(example.startswith(f"tightfit {name}") for example in examples), name
        for example in filter(None, examples):
            app.parse_args(example.split()[1:], exit_on_error=False, print_error=False)


def test_a_plan_is_found_written_verified_and_shown(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json.gz")
    code, found = answer(capsys, "plan", graph, "--budget", f"{NEEDED}B", "-o", plan)
    assert code == 0
    assert found.keys() >= KEYS
    assert found["planned_peak_bytes"] == found["budget_bytes"] == NEEDED
    assert found["constant_bytes"] == 2100
    assert (found["status"], found["overhead"], found["gap"]) == ("optimal", 0.0, 0.0)
    assert load_plan(plan).budget_bytes == NEEDED
    code, verified = answer(capsys, "verify", plan, graph)
    assert (code, verified["planned_peak_bytes"]) == (0, NEEDED)
    code, shown = answer(capsys, "show", plan, graph)
    assert (code, shown["explanation"]["peak_bytes"]) == (0, NEEDED)


def test_a_ratio_is_a_share_of_the_activation_peak(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answer(capsys, "plan", graph, "--budget-ratio", "1.5")
    assert (code, found["budget_bytes"]) == (0, 2100 + 1.5 * (NEEDED - 2100))


def test_modelled_costs_replace_those_of_the_file(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    words = ["plan", graph, "--budget", "1MiB", "--costs", "a100", "-o", plan]
    code, found = answer(capsys, *words)
    assert (code, found["planned_peak_bytes"] % 512) == (0, 0)  # rounded as on a GPU
    assert answer(capsys, "verify", plan, graph, "--costs", "a100")[0] == 0
    assert answer(capsys, "verify", plan, graph)[0] == 2


def test_an_infeasible_budget_exits_3_and_names_the_minimum(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answer(capsys, "plan", graph, "--budget", "4KB")
    assert (code, found["status"], found["proven"]) == (3, "infeasible", True)
    assert found["minimum_budget_bytes"] == NEEDED
    assert main(["plan", graph, "--budget", "4KB"]) == 3
    assert f"a plan fits {NEEDED} bytes" in capsys.readouterr().out


def test_the_minimum_is_found(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capsys, "minimum", graph)
    assert (code, found["status"]) == (0, "optimal")
    assert found["minimum_budget_bytes"] == found["lower_bound_bytes"] == NEEDED


def test_a_curve_is_printed_and_written(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["curve", graph, "--budgets", f"1.5,{NEEDED}B,0.5,0.4", "--iterations", "50"]
    for suffix in ("csv", "svg"):
        assert main([*words, "-o", str(tmp_path / f"curve.{suffix}")]) == 0
    assert "optimal" in capsys.readouterr().out
    with (tmp_path / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["optimal", "optimal", "infeasible", "infeasible"]
    assert [float(row["ratio"]) for row in rows] == [1.5, 1.0, 0.5, 0.4]
    assert (rows[1]["budget_bytes"], rows[1]["peak_bytes"]) == (str(NEEDED), str(NEEDED))
    plot = xml.etree.ElementTree.parse(tmp_path / "curve.svg").getroot()
    drawn = {text.text for text in plot.iter("{http://www.w3.org/2000/svg}text")}
    assert drawn >= {"plan", "proven lower bound"}
    code, found = answer(capsys, *words)
    assert (code, found["status"], len(found["rows"])) == (0, "feasible", 4)
    assert answer(capsys, "curve", graph, "--budgets", "0.5")[0] == 3


def test_a_graph_is_shown(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", graph]) == 0
    text = capsys.readouterr().out
    assert "3 forward, 4 backward" in text
    assert "4.49 KiB with nothing recomputed, of which activations 2.44 KiB" in text


def test_a_page_is_written_for_a_plan_and_for_a_graph(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, page = str(tmp_path / "plan.json"), tmp_path / "page.html"
    assert answer(capsys, "plan", graph, "--budget", "1MiB", "-o", plan)[0] == 0
    words = ("--budgets", f"1.5,{NEEDED}B,0.5", "-o", str(page))
    for target in ((plan, graph), (graph, "--budget", f"{NEEDED}B")):
        code, found = answer(capsys, "report", *target, *words)
        assert (code, found["planned_peak_bytes"]) == (0, NEEDED)
        assert found["page_bytes"] == page.stat().st_size
        text = page.read_text("utf-8")
        assert "within 1.00 MiB" in text if target[0] == plan else "within 4.49 KiB" in text
        assert "infeasible" in text  # a point of the curve
    assert answer(capsys, "report", graph, "--budget", "4KB", *words)[0] == 3


def test_a_file_for_ones_own_model_is_written_once_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert "tightfit check my_model.py:make" in capsys.readouterr().out
    assert main(["minimum", "my_model.py:make", "--batch", "2", "--time-limit", "2"]) == 0
    assert "a plan fits" in capsys.readouterr().out
    assert main(["init"]) == 2
    assert "my_model.py exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("report", "GRAPH", "--budget", "1GiB", "-o", "page.pdf"), "ends in .html, not page.pdf"),
        (("report", "GRAPH"), "give one budget: --budget 8GiB for all"),
        (("init", "model"), "model must end in .py"),
        (("plan", "GRAPH"), "give one budget: --budget 8GiB for all"),
        (("plan", "GRAPH", "--budget", "1GiB", "--budget-ratio", "1"), "give one budget"),
        (("plan", "GRAPH", "--budget", "80%"), "is a percentage, not a size"),
        (("plan", "GRAPH", "--budget", "8g"), "unknown unit 'g'"),
        (("plan", "GRAPH", "--budget", "-3GiB"), "the budget must be positive, got '-3GiB'"),
        (("plan", "GRAPH", "--budget-ratio", "-1"), "must be a positive number"),
        (("plan", "GRAPH", "--budget-ratio", "50%"), "'50%' is no share: write 0.5 for half"),
        (("plan", "GRAPH", "--budget", "1GiB", "--time-limit", "0"), "--time-limit must be"),
        (("plan", "GRAPH", "--budget", "1GiB", "--planner", "best"), "no planner is called 'best'"),
        (("plan", "GRAPH", "--budget", "1GiB", "--costs", "cheap"), "no modelled costs"),
        (("plan", "model.py", "--budget", "1GiB"), "'model.py' is no graph file"),
        (("plan", "none.json", "--budget", "1GiB"), "cannot read none.json"),
        (("plan", "GRAPH", "--badget", "1GiB"), "see tightfit plan --help"),
        (("verify", "GRAPH", "GRAPH"), "is a graph file, not a plan"),
        (("show", "GRAPH", "GRAPH"), "is no plan; a second file is the graph of a plan"),
        (("shwo", "GRAPH"), "shwo"),
        (("curve", "GRAPH", "--budgets", "half"), "cannot read the budget 'half'"),
        (("curve", "GRAPH", "--budgets", "0.5,"), "cannot read the budget ''"),
        (("curve", "GRAPH", "-o", "c.gif"), "'c.gif' must end in .csv, .svg, .png or .pdf"),
        (("curve", "GRAPH", "--time-limit", "0"), "--time-limit must be"),
        (("minimum", "GRAPH", "--time-limit", "0"), "--time-limit must be"),
        (("compare", "GRAPH", "--budgets", "1", "--time-limit", "0"), "--time-limit must be"),
        (("compare", "GRAPH", "--budgets", "1", "--exactness", "lossy"), "for models only"),
        (("check", "zoo:vit", "--time-limit", "0"), "--time-limit must be"),
        (("prove", "zoo:vit", "--time-limit", "0"), "--time-limit must be"),
        (("max-batch", "zoo:vit", "--budget", "1GiB", "--time-limit", "0"), "--time-limit must be"),
        (("max-batch", "GRAPH", "--budget", "1GiB"), "a graph file has one batch size only"),
        (("max-batch", "zoo:vit"), "--budget"),
    ],
)
def test_bad_input_exits_2_with_one_message(
    graph: str, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [graph if word == "GRAPH" else word for word in words]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    code, error = answer(capsys, *arguments)
    assert (code, error["status"]) == (2, "error")
    assert message in error["message"]


def test_commands_on_files_never_import_torch(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_bytes(example_of("graph-format.md"))
    (tmp_path / "plan.json").write_bytes(example_of("plan-format.md"))
    commands = [
        ["plan", "graph.json", "--budget", "12KiB", "-o", "new.json"],
        ["plan", "graph.json", "--budget-ratio", "1"],
        ["show", "graph.json"],
        ["show", "plan.json"],
        ["show", "plan.json", "graph.json"],
        ["report", "plan.json", "graph.json", "--budgets", "none", "-o", "page.html"],
        ["verify", "plan.json", "graph.json"],
        ["minimum", "graph.json"],
        ["curve", "graph.json", "--budgets", "1,0.9", "--time-limit", "1"],
        ["--help"],
    ]
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tightfit.cli import main\n"
        f"for words in {commands!r}: assert main(words) == 0, words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
