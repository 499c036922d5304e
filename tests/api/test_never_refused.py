"""A budget of what plain PyTorch takes for the same calls is never refused."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable

import pytest

from benchmarks.training_loops import LIFETIMES, Life, Loop, Run, live
from benchmarks.training_loops.drawn import drawn_loop

STEPS = 5
# kernels' numbers that a captured step holds as constants (64 bytes each)
NUMBERS_BYTES = 256


def lives(loop: Callable[[Run], None]) -> tuple[Life, Life]:
    """Return the life of a loop under plain PyTorch, and fitted within what that took."""
    gc.collect()
    plain = live(loop, Run(None, steps=STEPS, small=True))
    gc.collect()
    budget = plain.whole_bytes + NUMBERS_BYTES
    return plain, live(loop, Run(budget, steps=STEPS, small=True, cache=False))


def assert_trained_alike(plain: Life, fitted: Life) -> None:
    assert fitted.error == ""
    assert (fitted.losses, fitted.parameters) == (plain.losses, plain.parameters)
    assert fitted.budget_bytes is not None and fitted.largest_bytes <= fitted.budget_bytes


@pytest.mark.parametrize("loop", LIFETIMES.values(), ids=lambda loop: loop.name)
def test_what_lives_between_calls_is_no_reason_to_refuse(loop: Loop) -> None:
    assert_trained_alike(*lives(loop.function))


@pytest.mark.parametrize("seed", range(16))
def test_loops_drawn_at_random(seed: int) -> None:
    habits, loop = drawn_loop(seed)
    plain, fitted = lives(loop)
    assert fitted.error == "", habits
    assert_trained_alike(plain, fitted)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_proven_is_not_disproven(seed: int) -> None:
    """Within less than plain PyTorch takes: what is called proven is at most that."""
    _, loop = drawn_loop(seed)
    gc.collect()
    plain = live(loop, Run(None, steps=STEPS, small=True))
    gc.collect()
    fitted = live(loop, Run(plain.whole_bytes * 7 // 10, steps=STEPS, small=True, cache=False))
    proven = [int(n) for n in re.findall(r"proven: none fits less than (\d+)", fitted.error)]
    assert all(number <= plain.whole_bytes for number in proven), fitted.error
    if not fitted.error:
        assert_trained_alike(plain, fitted)
