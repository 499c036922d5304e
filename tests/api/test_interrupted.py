"""Ctrl-C during planning stops a program; a second attempt starts from what was found."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from benchmarks.training import let_search_end
from tightfit.session import stages


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Yield what makes Ctrl-C be pressed at the end of every search, where planners catch it.

    None of an earlier test goes on in the background by then.
    """
    let_search_end()
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    plan_with = stages.plan_with

    def pressed(*args: Any, **kwargs: Any) -> Any:
        outcome = plan_with(*args, **kwargs)
        with pytest.raises(KeyboardInterrupt):  # as planners do
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)  # where another thread runs, this one hears of it a little later
        return outcome

    # a program that a script runs in the background is deaf to Ctrl-C
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: monkeypatch.setattr(stages, "plan_with", pressed)
    signal.signal(signal.SIGINT, before)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))


def test_fit_stops_and_keeps_what_was_found(
    interrupted: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_with = stages.plan_with
    interrupted()
    x, keywords = torch.randn(256, 64), {"costs": "unit", "limits": (0.5, 0.0)}
    model = tightfit.fit(network(), "900KiB", **keywords)
    with pytest.raises(KeyboardInterrupt, match="second attempt starts from the plan"):
        model(x)
    monkeypatch.setattr(stages, "plan_with", again := Searches(plan_with))
    model = tightfit.fit(network(), "900KiB", **keywords)
    model(x).sum().backward()
    assert tightfit.report(model).overhead <= again.known_overhead


class Searches:
    """Checks that the first search is given the known plan."""

    def __init__(self, plan_with: Callable[..., Any]) -> None:
        self._plan_with = plan_with
        self.known_overhead: float | None = None

    def __call__(self, *args: Any, known: Any = None, **kwargs: Any) -> Any:
        assert known is not None or self.known_overhead is not None
        outcome = self._plan_with(*args, known=known, **kwargs)
        if self.known_overhead is None:
            self.known_overhead = outcome.overhead
        return outcome
