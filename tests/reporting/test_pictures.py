"""Pictures show every series under its name, say what is proven, and have the same bytes again."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.architecture import files_of
from support.every_picture import every_picture
from support.graphs import two_layers
from support.pictures import points_in, texts_in
from support.planning import EVERY_PLANNER
from tightfit.cli import main
from tightfit.errors import MissingExtra
from tightfit.graph.io import save_graph
from tightfit.planners.registry import DEFAULT
from tightfit.reporting.pictures.comparison import comparison_picture
from tightfit.reporting.pictures.curve import curve_picture
from tightfit.reporting.pictures.found import Found, Series
from tightfit.reporting.pictures.labels import moved_apart
from tightfit.reporting.pictures.page import SUFFIXES
from tightfit.reporting.pictures.policies import Measure, PolicyCurve, policies_picture
from tightfit.reporting.pictures.scales import percent_scale
from tightfit.reporting.pictures.style import FAMILIES, OURS, looks_of
from tightfit.studies.pytorch_methods import PYTORCH_METHODS

EVERYBODY = [*EVERY_PLANNER, *PYTORCH_METHODS]


def compared(names: list[str]) -> bytes:
    """A picture in which all planners find the same at two budgets, none at a third."""
    points = (
        Found(1.0, None, status="infeasible"),
        Found(2.0, 0.3, 0.1),
        Found(3.0, 0.01, 0.01, "optimal"),
    )
    series = [Series(name, points) for name in names]
    return comparison_picture(series, title="all alike", budgets="GiB")


@pytest.mark.parametrize("names", [EVERYBODY, EVERYBODY[:8]], ids=["a panel each", "one panel"])
def test_every_planner_is_named_and_drawn_at_every_budget_with_a_plan(names: list[str]) -> None:
    svg = compared(names)
    words = texts_in(svg).keys()
    for name in names:
        shown = f"tightfit ({name})" if name == OURS else name.removeprefix("pytorch.")
        assert shown in words or name in words
        drawn = {key: count for key, count in points_in(svg).items() if key.split()[0] == name}
        panels = len({key.split()[-1] for key in drawn})
        assert sum(drawn.values()) == 2 * panels and panels >= 1


def test_names_that_would_collide_are_drawn_apart() -> None:
    names = EVERYBODY[:8]
    places = [place for word in names for place in texts_in(compared(names)).get(word, [])]
    assert len(places) == len(names) - 1  # ours has another name
    assert len({x for x, _ in places}) == 1
    heights = sorted(y for _, y in places)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 10


def test_no_two_planners_look_alike_and_all_registered_ones_have_a_family() -> None:
    strangers = [f"mine_{number}" for number in range(30)]
    looks = looks_of([*EVERYBODY, *strangers])
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(looks)
    assert [name for name, look in looks.items() if look.is_ours] == [OURS] == [DEFAULT]
    assert {name for family in FAMILIES for name in family.names} == set(EVERYBODY)
    assert looks_of(["monet"]) == {"monet": looks["monet"]}


def test_a_planner_without_a_plan_says_so_and_a_proof_that_none_exists_is_hatched() -> None:
    nothing = Series("gist", (Found(1.0, None, status="unknown"),))
    svg = comparison_picture([nothing], title="", budgets="GiB")
    assert "gist: no plan" in texts_in(svg) and not points_in(svg)
    assert b"no plan exists (proven)" not in svg
    proven = compared(["anytime", "greedy"])
    assert b"no plan exists (proven)" in proven and points_in(proven)["infeasible 0"] == 1


def test_a_curve_shows_its_bound_and_what_is_infeasible_or_unknown() -> None:
    points = [
        Found(5.0, 0.0, 0.0, "optimal"),
        Found(4.0, 0.02, 0.01),
        Found(3.0, None, status="unknown"),
        Found(2.0, None, status="infeasible"),
        Found(1.0, None, status="infeasible"),
    ]
    svg = curve_picture(points, title="step", budgets="GiB")
    assert texts_in(svg).keys() >= {"plan", "proven lower bound"}
    assert b"no plan exists (proven)" in svg and b"no plan found" in svg
    counts = points_in(svg)
    assert (counts["infeasible 0"], counts["not found 0"]) == (2, 1)
    assert sum(n for name, n in counts.items() if name.startswith("plan")) == 2


@pytest.mark.parametrize("measure", ["slowdown", "accesses"])
def test_every_policy_is_named_and_drawn_where_the_program_goes_through(measure: Measure) -> None:
    curves = [
        PolicyCurve("improved", (0.3, 0.6, 1.0), (1.4, 1.1, 1.0)),
        PolicyCurve("lru", (0.3, 0.6, 1.0), (None, 1.3, 1.0)),
        PolicyCurve("size", (0.3, 0.6, 1.0), (None, None, None)),
    ]
    svg = policies_picture(
        curves, title="net", measure=measure, constants_ratio=0.1, bottleneck_ratio=0.2
    )
    assert texts_in(svg).keys() >= {"improved", "lru", "size: never"}
    assert points_in(svg) == {"improved 0": 3, "lru 0": 2}


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 3))
def test_names_move_as_little_as_possible(targets: list[int], gap: int) -> None:
    targets.sort()
    places = moved_apart(targets, gap, 0, 12)
    grid = itertools.combinations(range(13), len(targets))
    spaced = [p for p in grid if all(b - a >= gap for a, b in itertools.pairwise(p))]

    def moved(places: tuple[float, ...]) -> float:
        return sum((place - target) ** 2 for place, target in zip(places, targets, strict=True))

    assert moved(tuple(places)) <= min(map(moved, spaced)) + 1e-9
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(places))
    assert places[0] >= -1e-9 and places[-1] <= 12 + 1e-9


@given(st.lists(st.one_of(st.just(0.0), st.floats(-20, 500)), min_size=1))
def test_an_axis_shows_every_value_and_zero_where_it_is_one(values: list[float]) -> None:
    scale = percent_scale(values)
    assert scale.low <= min(values) and max(values) <= scale.high
    assert list(scale.ticks) == sorted(set(scale.ticks)) and len(scale.ticks) <= 20
    assert scale.kind != "log" or min(values) > 0
    if scale.kind != "log":
        assert scale.low <= 0 and 0.0 in scale.ticks


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_picture_has_the_same_bytes(suffix: str) -> None:
    begin = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    first = every_picture(suffix)
    assert all(picture.startswith(begin) for picture in first)
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None, "axes.grid": False}):
        assert every_picture(suffix) == first


def test_bytes_do_not_depend_on_the_process(tmp_path: Path) -> None:
    code = (
        "import sys; from support.every_picture import every_picture\n"
        "sys.stdout.buffer.write(b''.join(every_picture('.svg')))"
    )
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": tests, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stdout == b"".join(every_picture(".svg"))


@pytest.mark.parametrize(
    "command",
    [lambda g: ["curve", g], lambda g: ["compare", g, "--budgets", "1", "--planners", "greedy"]],
    ids=["curve", "compare"],
)
def test_without_matplotlib_a_command_says_what_to_install_before_it_plans(
    command: Callable[[str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    graph = tmp_path / "graph.json"
    save_graph(two_layers(), graph)
    assert main([*command(str(graph)), "-o", str(tmp_path / "out.svg")]) == 2
    captured = capsys.readouterr()
    assert "pip install tightfit[plot]" in captured.err and captured.out == ""
    with pytest.raises(MissingExtra):
        every_picture(".svg")


def test_only_pictures_know_matplotlib_and_import_it_where_they_draw() -> None:
    for file in files_of():
        lines = {line for line, name in file.imports if name.split(".")[0] == "matplotlib"}
        if lines:
            assert file.place.startswith("reporting/pictures/"), file.place
    code = (
        "import sys, importlib\n"
        f"for name in {[file.module for file in files_of() if 'pictures' in file.place]!r}:\n"
        "    importlib.import_module(name)\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
