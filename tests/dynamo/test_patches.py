"""What a thread replaces of PyTorch for a while: unseen by others, put back in any order."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from tightfit.torch_private.patches import Patch


class Base:
    def inherited(self) -> str:
        return "plain"


class Owner(Base):
    def method(self) -> str:
        return "plain"

    @staticmethod
    def static() -> str:
        return "plain"


NAMES = ["method", "static", "inherited"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_threads_end_in_any_order_and_each_sees_its_own(name: str, order: tuple[int, ...]) -> None:
    before = dict(vars(Owner))
    patch = Patch(Owner, name)
    entered, ends = threading.Barrier(4), [threading.Event() for _ in order]
    seen: dict[int, list[str]] = {}

    def run(number: int) -> None:
        def replaced(original: Any, *args: Any) -> str:
            return f"{number} over {original(*args)}"

        with patch.by(replaced):
            entered.wait(10)
            first = getattr(Owner(), name)()
            ends[number].wait(10)
            seen[number] = [first, getattr(Owner(), name)()]

    threads = [threading.Thread(target=run, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    entered.wait(10)
    for number in order:
        assert getattr(Owner(), name)() == "plain"
        ends[number].set()
        threads[order.index(number)].join(10)
    assert seen == {number: [f"{number} over plain"] * 2 for number in order}
    assert dict(vars(Owner)) == before


@pytest.mark.parametrize("name", NAMES)
def test_within_one_thread_the_inner_one_stands_before_the_outer_one(name: str) -> None:
    patch = Patch(Owner, name)

    def said(word: str) -> Any:
        return lambda original, *args: f"{word} {original(*args)}"

    with patch.by(said("outer")):
        with pytest.raises(ZeroDivisionError), patch.by(said("inner")):
            assert getattr(Owner(), name)() == "inner outer plain"
            raise ZeroDivisionError
        assert getattr(Owner(), name)() == "outer plain"
    assert getattr(Owner(), name)() == "plain"
