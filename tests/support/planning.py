"""Which planners a test calls."""

from __future__ import annotations

from types import ModuleType

import pytest

from benchmarks.training import let_search_end
from tightfit.planners.registry import PLANNERS

EVERY_PLANNER = tuple(
    name
    for entry in PLANNERS.values()
    for name in (entry.name, *(f"{entry.name}:{option}" for option in entry.options))
)
"""All names that `find_planner` takes."""


def planners_called(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, *functions: str
) -> list[str]:
    """Return the names of the planners that functions of a module are called with from now on.

    No search of an earlier test goes on in the background by then.
    """
    let_search_end()
    names: list[str] = []
    for function in functions:
        original = getattr(module, function)

        def counted(name, *rest, original=original, **named):
            names.append(name)
            return original(name, *rest, **named)

        monkeypatch.setattr(module, function, counted)
    return names
