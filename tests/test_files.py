"""Graph and plan files: what is written is read back, and bad files are refused by name."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.documents import example_of
from support.graphs import training_graphs, two_layers
from tightfit import files
from tightfit.errors import BadInput, InvalidGraph
from tightfit.graph import Graph
from tightfit.graph.io import graph_from_json, graph_to_json, load_graph, save_graph
from tightfit.plan import assemble, keep_everything, verify
from tightfit.plan.io import load_plan, plan_from_json, plan_to_json, save_plan

GRAPH = two_layers()
PLAN = assemble(GRAPH, keep_everything(GRAPH), budget_bytes=5000)
GRAPH_TEXT = graph_to_json(GRAPH)
PLAN_TEXT = plan_to_json(PLAN)


def test_the_documented_examples_are_a_valid_graph_and_its_plan() -> None:
    graph = graph_from_json(example_of("graph-format.md"))
    plan = plan_from_json(example_of("plan-format.md"))
    verify(plan, graph)


@given(training_graphs())
def test_any_graph_is_read_back_as_written(graph: Graph) -> None:
    text = graph_to_json(graph)
    assert graph_from_json(text) == graph
    assert graph_to_json(graph_from_json(text)) == text


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_files_are_written_whole_and_equal(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / "graph", tmp_path / "again"):
        path.mkdir()
        save_graph(GRAPH, path / name)
        save_plan(PLAN, path / f"plan.{name}")
    assert load_graph(tmp_path / "graph" / name) == GRAPH
    assert load_plan(tmp_path / "graph" / f"plan.{name}") == PLAN
    assert (tmp_path / "graph" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "graph").iterdir()) == sorted([name, f"plan.{name}"])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(BadInput, match=r"cannot write .*No space left on device"):
        save_plan(msgspec.structs.replace(PLAN, budget_bytes=1), path)
    assert load_plan(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no complete JSON text: Input data was truncated"),
        (GRAPH_TEXT[:-20], "no complete JSON text: Input data was truncated"),
        (b"budget = 3", "no complete JSON text"),
        (GRAPH_TEXT.replace(b"relu", b"\xff"), "no complete JSON text"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", 'it has no "format" field'),
        (PLAN_TEXT, "g.json is a plan file, not a graph"),
        (GRAPH_TEXT.replace(b'"format": 1', b'"format": 2'), "format 2, but this version"),
        (GRAPH_TEXT.replace(b'"format": 1', b'"format": 0'), "formats count from 1"),
        (
            GRAPH_TEXT.replace(b'"size_bytes":400', b'"size_bytes":"400"', 1),
            "Expected `int`, got `str` - at `$.values[3].size_bytes`",
        ),
        (
            GRAPH_TEXT.replace(b'"size_bytes":400', b'"size":400', 1),
            "Object contains unknown field `size` - at `$.values[3]`",
        ),
        (GRAPH_TEXT.replace(b'"reads":[3]', b'"reads":[3.5]'), "$.ops[1].alternatives[0].reads[0]"),
        (b'{"format":1,"values":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "g.json"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        load_graph(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"reads":[3]', b'"reads":[8]', "form a cycle or are out of order"),
        (b'"reads":[3]', b'"reads":[99]', "value 99 does not exist"),
        (b'{"id":3,', b'{"id":4,', "value 4 ('first') is at position 3"),
        (b'"size_bytes":400', b'"size_bytes":-400', "size_bytes -400 is out of range"),
        (b'"size_bytes":400', b'"size_bytes":4611686018427387904', "is out of range"),
        (b'"writes":[4]', b'"writes":[3]', "value 3 is written by two ops"),
        (b'"parameters":2000', b'"parameters":1', "constants_bytes['parameters'] counts only 1"),
    ],
)
def test_an_edited_graph_that_breaks_a_rule_is_refused(
    tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    assert old in GRAPH_TEXT
    path = tmp_path / "g.json"
    path.write_bytes(GRAPH_TEXT.replace(old, new, 1))
    with pytest.raises(InvalidGraph) as caught:
        load_graph(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b'"do":"free"',
            b'"do":"send"',
            "unknown instruction 'send' - at `$.instructions[3].do`",
        ),
        (b'"do":"free",', b"", "missing required field `do`"),
        (b'"op":2', b'"op":2,"twice":true', "unknown field `twice`"),
        (b'"budget_bytes": 5000', b'"budget_bytes": "5 KB"', "$.budget_bytes"),
    ],
)
def test_an_edited_plan_that_is_none_is_refused(old: bytes, new: bytes, message: str) -> None:
    assert old in PLAN_TEXT
    with pytest.raises(BadInput) as caught:
        plan_from_json(PLAN_TEXT.replace(old, new, 1))
    assert message in str(caught.value)


def test_unreadable_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read .*none\.json: No such file"):
        load_graph(tmp_path / "none.json")
    with pytest.raises(BadInput, match="is a folder, not a file"):
        load_graph(tmp_path)
    with pytest.raises(BadInput, match=r"cannot write .*No such file or directory"):
        save_graph(GRAPH, tmp_path / "none" / "g.json")


def test_damaged_gzip_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "g.json.gz"
    whole = gzip.compress(GRAPH_TEXT)
    for content, message in [
        (GRAPH_TEXT, "no valid gzip file"),
        (whole[:-30], "truncated gzip file"),
        (whole + b"more", "4 bytes after the end"),
    ]:
        path.write_bytes(content)
        with pytest.raises(BadInput, match=message):
            load_graph(path)


def test_huge_files_are_refused_before_memory_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "g.json"
    with path.open("wb") as file:
        file.truncate(files.LARGEST_FILE_BYTES + 1)
    with pytest.raises(BadInput, match=r"files above 128\.00 MiB are refused"):
        load_graph(path)
    bomb = tmp_path / "bomb.json.gz"
    monkeypatch.setattr(files, "LARGEST_CONTENT_BYTES", 1 << 20)
    bomb.write_bytes(gzip.compress(b" " * (2 << 20)))
    with pytest.raises(BadInput, match=r"decompresses to more than 1\.00 MiB"):
        load_graph(bomb)
    many = b'{"format":1,"values":[' + b"{}," * 2_000_001 + b"{}]}"
    with pytest.raises(BadInput, match="more than 2,000,000 records"):
        graph_from_json(many)


@st.composite
def damaged(draw: st.DrawFn, text: bytes) -> bytes:
    """Draw a text with a few bytes cut out, repeated or replaced."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 30)))
        middle = draw(
            st.sampled_from([b"", text[start:end] * 2, b"7", b"-1", b"null", b"[]", b"{}", b'"'])
        )
        text = text[:start] + middle + text[end:]
    return text


@given(damaged(GRAPH_TEXT), damaged(PLAN_TEXT))
def test_damaged_files_never_crash(graph_text: bytes, plan_text: bytes) -> None:
    try:
        graph = graph_from_json(graph_text)
    except BadInput:
        graph = GRAPH
    try:
        verify(plan_from_json(plan_text), graph)
    except BadInput:
        return
