"""The core is compiled where that can be; elsewhere Python takes its place and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tightfit
from tightfit.dynamic.native import runtime
from tightfit.dynamic.native.build import CoreUnavailable, built_library
from tightfit.errors import BadInput


def test_a_compiler_that_refuses_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CoreUnavailable, match="the compiler refuses, see"):
        built_library()
    with pytest.raises(CoreUnavailable, match=r"refused before, see .*delete it to try again"):
        built_library()
    monkeypatch.setenv("CXX", str(tmp_path / "no_such_compiler"))
    with pytest.raises(CoreUnavailable, match="no C\\+\\+ compiler was found"):
        built_library()


def test_python_sees_the_operators_where_the_core_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise CoreUnavailable("no C++ compiler was found")

    monkeypatch.setattr(runtime, "compiled_core", refuse)
    with tightfit.online("1TiB", smallest=1) as region:
        three = torch.ones(64) + 2
        region.evict("1TiB")
        assert bool((three == 3).all())
    assert region.report().core == "Python (no C++ compiler was found)"
    with (
        pytest.raises(BadInput, match=r"core='C\+\+' cannot be had: no C\+\+ compiler was found"),
        tightfit.online("1TiB", core="C++"),
    ):
        pass
    with tightfit.online("1TiB", core="Python") as region:
        assert region.report().core == "Python"
    with pytest.raises(BadInput, match="'auto', 'C\\+\\+' or 'Python'"):
        tightfit.online("1TiB", core="Rust")  # type: ignore[arg-type]
