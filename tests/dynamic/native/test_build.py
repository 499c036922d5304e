"""The core is compiled where that can be; elsewhere Python takes its place and says why."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tightfit
from support.releases import needs
from tightfit.dynamic import region as region_module
from tightfit.dynamic.native import build, runtime
from tightfit.dynamic.native.build import compiled_core
from tightfit.dynamic.native.compiling import (
    BeingCompiled,
    CoreUnavailable,
    compile_apart,
    compile_here,
)
from tightfit.errors import BadInput
from tightfit.torch_private.releases import COMPILED_ONLINE, Since

WRITES_ITS_PRIORITY = (
    sys.executable,
    "-c",
    "import os, pathlib, sys; pathlib.Path(sys.argv[-1]).write_text(str(os.nice(0)))",
)


def until(is_so: Callable[[], bool]) -> None:
    """Wait for another process; the limit of the test ends this."""
    while not is_so():
        time.sleep(0.02)


@needs(COMPILED_ONLINE)
def test_a_compiler_that_refuses_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "tightfit_online_core", raising=False)
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CoreUnavailable, match="the compiler refuses, see"):
        compiled_core()
    for waits in (True, False):
        with pytest.raises(CoreUnavailable, match=r"refused before, see .*delete it to try again"):
            compiled_core(waits=waits)
    monkeypatch.setenv("CXX", str(tmp_path / "no_such_compiler"))
    with pytest.raises(CoreUnavailable, match="no C\\+\\+ compiler was found"):
        compiled_core()


def test_an_older_pytorch_has_the_core_in_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tightfit_online_core", raising=False)
    monkeypatch.setattr(build, "COMPILED_ONLINE", Since((99, 0), "it is compiled", "it is not"))
    region_module._announce_once.cache_clear()
    for _ in range(2):
        with tightfit.online("1TiB") as region:
            torch.ones(64).sum()
        assert region.report().core.startswith("Python (it needs PyTorch 99.0 or later; here is")
    assert capsys.readouterr().err.count("sees operators in Python") == 1
    with (
        pytest.raises(BadInput, match=r"core='C\+\+' cannot be had: it needs PyTorch 99"),
        tightfit.online("1TiB", core="C++"),
    ):
        pass


def test_another_process_compiles_while_nobody_waits(tmp_path: Path) -> None:
    library = tmp_path / "core.so"
    assert isinstance(compile_apart(library, WRITES_ITS_PRIORITY), BeingCompiled)
    until(library.exists)
    assert library.read_text() == "19"
    compile_here(library, ["false"])  # there already: no compiler is asked
    assert not library.with_suffix(".txt").exists()


def test_what_another_process_could_not_compile_is_said_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "core.so"
    compile_apart(library, ["false"])
    until(library.with_suffix(".txt").exists)
    with pytest.raises(CoreUnavailable, match="refused before"):
        compile_apart(library, ["false"])
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    process_fails = tmp_path / "other.so"

    def has_ended() -> bool:
        try:
            compile_apart(process_fails, ["false"])
        except CoreUnavailable as error:
            return str(error) == "the process that compiles it has ended with 1"
        return False

    until(has_ended)


def test_python_sees_the_operators_where_the_core_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*, waits: bool) -> None:
        raise CoreUnavailable("no C++ compiler was found")

    monkeypatch.setattr(runtime, "compiled_core", refuse)
    with (
        pytest.warns(UserWarning, match="in Python.*: no C\\+\\+ compiler was found"),
        tightfit.online("1TiB", smallest=1) as region,
    ):
        three = torch.ones(64) + 2
        region.evict("1TiB")
        assert bool((three == 3).all())
    assert region.report().core == "Python (no C++ compiler was found)"
    with tightfit.online("1TiB"):  # says so once
        pass
    with (
        pytest.raises(BadInput, match=r"core='C\+\+' cannot be had: no C\+\+ compiler was found"),
        tightfit.online("1TiB", core="C++"),
    ):
        pass
    with tightfit.online("1TiB", core="Python") as region:
        assert region.report().core == "Python"
    with pytest.raises(BadInput, match="'auto', 'C\\+\\+' or 'Python'"):
        tightfit.online("1TiB", core="Rust")  # type: ignore[arg-type]


@needs(COMPILED_ONLINE)
def test_python_sees_the_operators_until_the_core_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def compiled_later(*, waits: bool):
        asked.append(waits)
        if len(asked) == 1:
            raise BeingCompiled("the core in C++ is being compiled")
        return compiled_core()

    monkeypatch.setattr(runtime, "compiled_core", compiled_later)
    cores = []
    for _ in range(2):
        with tightfit.online("1TiB") as region:
            torch.ones(64).sum()
        cores.append(region.report().core)
    assert cores == ["Python (the core in C++ is being compiled)", "C++"]
    assert asked == [False, False]
