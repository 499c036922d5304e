"""What lives is found without harm to what other threads are making."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from tightfit.allocator.alive import alive


class Kept:
    """A class of its own."""


@pytest.fixture
def threads_take_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_objects_of_a_class_are_found() -> None:
    kept = [Kept() for _ in range(3)]
    assert {id(found) for found in alive({Kept})} == {id(each) for each in kept}


@pytest.mark.usefixtures("threads_take_turns")
def test_tuples_that_another_thread_is_making_are_left_alone() -> None:
    """`gc.get_objects` in a loop has this thread fail at once."""
    errors: list[Exception] = []
    ended = threading.Event()

    def make() -> None:
        try:
            while not ended.is_set():
                tuple(i for i in range(13))
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    for _ in range(20):
        alive({Kept})
    ended.set()
    thread.join()
    assert not errors
