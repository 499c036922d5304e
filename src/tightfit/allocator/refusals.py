"""Requests that a limit has refused: how they are recognised, and said in terms of a budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from tightfit.allocator.cuda_tally import budget_refusal
from tightfit.allocator.tally import optional_requests
from tightfit.errors import BudgetExceeded
from tightfit.units import format_bytes

Result = TypeVar("Result")

_REFUSAL = "tightfit: the budget of"  # how hook.c begins the text of its exception
_ADVICE = ". Try a budget of"  # and what it advises


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that a limit has refused a request."""
    return isinstance(error, RuntimeError) and _described(error).startswith(_REFUSAL)


def unless_refused(run: Callable[[], Result]) -> Result | None:
    """Return a call's result; None where a limit refuses one of its requests."""
    try:
        with optional_requests():
            return run()
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        return None


def refused_bytes(error: BaseException) -> tuple[int, int, int]:
    """Return budget, requested bytes and held bytes of an error for `is_refusal`."""
    budget, asked, held, _ = _numbers(error)
    return budget, asked, held


def likely_further_bytes(error: BaseException) -> int:
    """Return such an error's guess of later requests."""
    _, asked, held, named = _numbers(error)
    return named - held - asked


def _numbers(error: BaseException) -> tuple[int, int, int, int]:
    """Return the same, and which budget the error names."""
    budget, asked, held, named = (int(n) for n in re.findall(r"(\d+) bytes", _described(error))[:4])
    return budget, asked, held, named


def budget_exceeded(
    error: BaseException, message: str, *, further_bytes: int | None = None
) -> BudgetExceeded:
    """Return the error of something that a limit has refused a request.

    `error`: for which `is_refusal`. `message`: names the refused code, and the current state.
    `further_bytes`: later requests; None: not known, and the error's own guess counts.
    """
    budget, asked, held, guessed = _numbers(error)
    text = f"{message} {_described(error)}"
    if further_bytes is None:
        return BudgetExceeded(text, budget_bytes=budget, measured_bytes=guessed)
    least = held + asked + further_bytes
    text = text.split(_ADVICE)[0] + f"{_ADVICE} {least} bytes ({format_bytes(least)})"
    return BudgetExceeded(text, budget_bytes=budget, measured_bytes=least)


def _described(error: BaseException) -> str:
    """Return the text of an error; the text of a GPU's allocator in terms of its limit."""
    return budget_refusal(error) or str(error)
