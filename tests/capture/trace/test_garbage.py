"""Garbage of capturing is collected once, at the end of the outermost context."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from tightfit.capture.trace.garbage import fewer_collections


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Yield the generations that were collected, as they are."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_an_inner_context_leaves_garbage_to_the_outermost(collections: list[int]) -> None:
    thresholds = gc.get_threshold()
    with fewer_collections():
        with fewer_collections():
            cycle = weakref.ref(_Cycle())
        assert 2 not in collections
        assert gc.get_threshold() != thresholds
    assert collections.count(2) == 1
    assert cycle() is None
    assert gc.get_threshold() == thresholds


def test_a_context_that_ends_by_an_error_collects_and_leaves_the_next_one_outermost() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="traced"), fewer_collections():
            cycle = weakref.ref(_Cycle())
            raise ValueError("traced")
        assert cycle() is None


def test_another_thread_collects_its_own() -> None:
    found: list[object] = []

    def capture() -> None:
        with fewer_collections():
            cycle = weakref.ref(_Cycle())
        found.append(cycle())

    with fewer_collections():
        other = threading.Thread(target=capture)
        other.start()
        other.join()
    assert found == [None]
