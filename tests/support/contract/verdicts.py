"""What came of a case: right, refused by name, a raw error, or wrong."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.contract.facts import Fact, same
from tightfit.errors import TightfitError

RECORD = Path(__file__).parents[2] / "contract" / "verdicts.json"
"""For each door and battery the cases that are not right, and why: a case left out is right."""
_MOST_CHARACTERS = 160
_ABOUT_BITS = re.compile("last bits? may differ|differ .*by rounding")


class Verdict(enum.IntEnum):
    """From the best to the worst."""

    RIGHT = 0
    ALLOWED = 1
    """Goes on where plain PyTorch raises: its caller may not change an output in place, or has
    overwritten what a backward needs; here the gradients are those of the call as it was."""
    ANNOUNCED = 2
    """Last bits differ, or what a case excuses, and it was said."""
    REFUSED = 3
    """An error of tightfit's own, where plain PyTorch runs."""
    RAW = 4
    """Another error, where plain PyTorch runs."""
    WRONG = 5


@dataclass(frozen=True)
class Outcome:
    """A verdict and what it rests on."""

    verdict: Verdict
    why: str = ""

    def __str__(self) -> str:
        return f"{self.verdict.name.lower()}: {self.why}" if self.why else "right"


@dataclass(frozen=True)
class Raised:
    """An error, and at which of a step's stages it came."""

    stage: str
    error: Exception


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the worst outcome, of several the first."""
    return max(outcomes, key=lambda each: each.verdict, default=Outcome(Verdict.RIGHT))


def compared(
    where: str,
    expected: Sequence[Fact | Raised],
    found: Sequence[Fact | Raised],
    said: str = "",
    excuse: str = "",
) -> Outcome:
    """Judge what was seen of a step by what plain PyTorch shows.

    Parameters
    ----------
    where : str
        The step, for the text.
    expected, found : sequence
        Facts, and an error at the end if one was raised.
    said : str
        What was announced meanwhile.
    excuse : str
        What an announcement must name to excuse values that differ by more than rounding.
    """
    plain_error = expected[-1] if expected and isinstance(expected[-1], Raised) else None
    error = found[-1] if found and isinstance(found[-1], Raised) else None
    if error is not None and plain_error is None:
        return Outcome(*_of_error(where, error))
    if plain_error is not None and error is None:
        verdict = Verdict.ALLOWED if plain_error.stage == "change" else Verdict.WRONG
        return Outcome(verdict, f"{where}: only plain PyTorch raises {_short(plain_error)}")
    if plain_error is not None and error is not None:
        if isinstance(error.error, (type(plain_error.error), TightfitError)):
            return Outcome(Verdict.RIGHT)
        return Outcome(*_of_error(where, error))
    differences = _differences(dict(_facts(expected)), dict(_facts(found)))
    if not differences:
        return Outcome(Verdict.RIGHT)
    label, first, second = differences[0]
    rounded = all(_close(a, b) for _, a, b in differences)
    is_said = (rounded and _ABOUT_BITS.search(said)) or (excuse and excuse in said)
    verdict = Verdict.ANNOUNCED if is_said else Verdict.WRONG
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    text = "last bits differ" if rounded else f"{_told(second)} for {_told(first)}"
    return Outcome(verdict, f"{where}: {label}: {text}{more}")


def _facts(seen: Sequence[Fact | Raised]) -> list[Fact]:
    return [each for each in seen if not isinstance(each, Raised)]


def _differences(
    expected: Mapping[str, Any], found: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    missing = object()
    labels = [*expected, *(label for label in found if label not in expected)]
    pairs = [(label, expected.get(label, missing), found.get(label, missing)) for label in labels]
    return [pair for pair in pairs if not same(pair[1], pair[2])]


def _close(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if not (first.is_floating_point() or first.is_complex()):
        return False
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"another value of {tuple(value.shape)}"
    return "nothing" if type(value) is object else repr(value)


def _of_error(where: str, raised: Raised) -> tuple[Verdict, str]:
    verdict = Verdict.REFUSED if isinstance(raised.error, TightfitError) else Verdict.RAW
    return verdict, f"{where}: {_short(raised)}"


def _short(raised: Raised) -> str:
    text = " ".join(str(raised.error).split())
    text = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)? (Ki|Mi)?B", "...", text)
    return f"{type(raised.error).__name__} in {raised.stage}: {text[:_MOST_CHARACTERS]}"


def recorded(key: str, battery: str) -> dict[str, str]:
    """Return the cases of a battery that are recorded as not right for a door."""
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    return record.get(key, {}).get(battery, {})


def check_against_record(name: str, outcome: Outcome, key: str, battery: str) -> None:
    """Fail if a case is worse than recorded, or better and not recorded so."""
    record = recorded(key, battery).get(name, str(Outcome(Verdict.RIGHT)))
    before = Verdict[record.partition(":")[0].upper()]
    assert outcome.verdict <= before, f"{outcome}. Recorded: {record}"
    hint = f"better than recorded, write it down: python tests/write_verdicts.py {battery}"
    assert outcome.verdict == before, f"{hint}. Now: {outcome}. Recorded: {record}"
