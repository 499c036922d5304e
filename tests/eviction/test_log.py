"""The text of a log: read back as written, refused where it is wrong, settled into events."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from support.logs import call, programs
from tightfit.errors import BadInput
from tightfit.eviction.log.instructions import (
    Call,
    Constant,
    Copy,
    CopyFrom,
    Instruction,
    Mutate,
    Release,
    Result,
)
from tightfit.eviction.log.reader import read_instructions
from tightfit.eviction.log.resolve import load_log, resolve
from tightfit.eviction.log.views import without_views
from tightfit.eviction.log.writer import log_text, write_log

START = '{"INSTRUCTION":"ANNOTATE","ANNOTATION":"START"}'
X = '{"INSTRUCTION":"CONSTANT","NAME":"x"}\n{"INSTRUCTION":"MEMORY","NAME":"x","MEMORY":"4"}'
CALL = '{"INSTRUCTION":"CALL","NAME":"f","ARGS":["x"],"RESULT":["y"],"TIME":"3"}'
MEMORY = '{"INSTRUCTION":"MEMORY","NAME":"y","MEMORY":"8"}'
ALIAS = '{"INSTRUCTION":"ALIAS","NAME":"y","ALIAS":"-1"}'


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(program=programs())
@pytest.mark.parametrize("name", ["log", "log.gz"])
def test_what_is_written_is_read_back(
    tmp_path: Path, name: str, program: list[Instruction]
) -> None:
    write_log(tmp_path / name, program)
    assert list(read_instructions(tmp_path / name)) == program


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([X], "no ANNOTATE START"),
        ([START, X, ""], "line 4: no instruction"),
        ([START, '{"INSTRUCTION":"JUMP","NAME":"x"}'], "line 2: no instruction"),
        ([START, '{"INSTRUCTION":"RELEASE","NAME":"x","WHY":"1"}'], "unknown field `WHY`"),
        ([START, '{"INSTRUCTION":"RELEASE"}'], "missing required field `NAME`"),
        ([START, X.replace('"4"', "4")], "line 3: no instruction"),
        ([START, X.replace('"4"', '"-4"')], "line 3: MEMORY '-4' is no decimal integer"),
        ([START, X, X], "line 5: the name 'x' is defined twice"),
        ([START, CALL], "line 2: 'x' is used before it is defined"),
        ([START, X, CALL, ALIAS], "line 5: expected the MEMORY line of 'y', but found ALIAS"),
        ([START, X, CALL, MEMORY], "expected the ALIAS line of 'y', but the log ends"),
        ([START, X, CALL, MEMORY, ALIAS.replace("-1", "1")], "there is no argument 1 among 1"),
        ([START, X, MEMORY], "line 4: MEMORY of 'y' belongs to no instruction"),
        ([START, X], "no operator call"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, lines: list[str], why: str) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(BadInput) as error:
        load_log(path)
    assert why in str(error.value)
    assert "log" in str(error.value)


def test_what_comes_before_start_and_its_names_count_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    release = '{"INSTRUCTION":"RELEASE","NAME":"x"}'
    before = [X, CALL, MEMORY, ALIAS]
    path.write_text("\n".join([*before, START, release, *before]))
    log = load_log(path)
    assert (log.base_cost_ns, log.constant_bytes, log.base_peak_bytes) == (3, 4, 12)


def test_a_file_that_is_cut_off_or_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    content = gzip.compress(log_text([Constant("x", 1), call("y", "x")] * 1))
    path.write_bytes(content[:-9])
    with pytest.raises(BadInput, match="cannot read"):
        load_log(path)
    with pytest.raises(BadInput, match="No such file"):
        load_log(tmp_path / "nothing")


def test_a_tensor_released_more_often_than_held_is_refused() -> None:
    with pytest.raises(BadInput, match="releases 'y' more often"):
        resolve([Constant("x", 1), call("y", "x"), Release("y"), Release("y")])


def test_mutation_makes_a_new_storage_and_names_move_to_it() -> None:
    log = resolve(
        [
            Constant("x", 4),
            call("y", "x", size=8),
            Call("view", ("y",), (Result("v", 0, 0),), 1),
            Mutate("add_", ("v", "x"), (0,), 2),
            Copy("w", "v"),
            Release("y"),
            CopyFrom("x", "w"),
        ]
    )
    roots = [log.tensors[storage.root].name for storage in log.storages]
    assert roots == ["x", "y", "v$"]
    assert log.storages[2].size_bytes == 8  # the whole storage, written through a view
    assert log.base_peak_bytes == 4 + 8 + 8  # the old content and the new
    assert log.held == (3, 3, 3)  # x, v and w are the new tensor
    assert log.bottleneck_bytes == 4 + 8


def test_without_views_every_tensor_is_the_root_of_its_storage() -> None:
    log = resolve(
        [
            Constant("x", 4),
            Call("both", ("x",), (Result("y", 8, None), Result("v", 0, 0)), 5),
            Call("view", ("y",), (Result("w", 0, 0),), 1),
            call("z", "w", "v"),
            Release("y"),
        ]
    )
    plain = without_views(log)
    assert plain.held == (0, 0, 1, 4)  # x, v, w, z
    assert [n for event, n in plain.occurrences if event.name == "COMPUTE"] == [1, 3]
    assert plain.operators[3].arguments == (1, 0)
    assert plain.base_peak_bytes == log.base_peak_bytes
