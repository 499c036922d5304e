"""Processes that plan or solve for this one: they end when they should, whatever they do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tightfit.planners.child import run_in_child


def test_a_child_that_hangs_is_killed_and_what_it_reported_is_kept() -> None:
    reports: list[bytes] = []
    started = time.monotonic()
    target = "support.hanging:hang"
    assert not run_in_child(target, b"hello", seconds=3.0, on_report=reports.append)
    assert time.monotonic() - started < 10
    assert b"hello" in reports


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="no_such_module"):
        run_in_child("no_such_module:f", b"", seconds=20.0, on_report=lambda data: None)


def test_a_child_of_a_child_that_is_killed_ends_too(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    reports: list[bytes] = []
    target = "support.hanging:beat_below"
    path = str(file).encode()
    assert not run_in_child(target, path, seconds=3.0, on_report=reports.append)
    assert file.exists()
    time.sleep(0.5)
    last = file.stat().st_mtime_ns
    time.sleep(0.5)
    assert file.stat().st_mtime_ns == last


def test_a_child_finds_what_this_process_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may have put the folder of tightfit on its own path."""
    (tmp_path / "elsewhere.py").write_text("def answer(payload, report):\n    report(payload)\n")
    monkeypatch.syspath_prepend(tmp_path)
    reports: list[bytes] = []
    assert run_in_child("elsewhere:answer", b"here", seconds=20.0, on_report=reports.append)
    assert b"here" in reports
