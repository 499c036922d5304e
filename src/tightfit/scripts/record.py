"""The record of a run of a program, event by event, in a file; how two runs differ."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

_MOST_SHOWN = 100


class Line(msgspec.Struct, frozen=True, tag="line"):
    """A line that the program has printed."""

    text: str


class Step(msgspec.Struct, frozen=True, tag="step"):
    """An optimizer step: its number from 1 on, and hashes of tensors after it, by name."""

    number: int
    optimizer: str
    digests: dict[str, str]


class Generator(msgspec.Struct, frozen=True, tag="generator"):
    """A generator of random numbers; a hash of its state at the end, "" if it is untouched."""

    name: str
    digest: str


class Failure(msgspec.Struct, frozen=True):
    """An error that ended a program."""

    kind: str  # the class
    message: str
    # "program": a `CannotProve`; "budget": the budget is too small; "step": another of tightfit
    refuses: Literal["program", "budget", "step", ""] = ""
    # where the budget is too small: the budget, and one that is expected to be enough
    budget_bytes: int | None = None
    minimum_bytes: int | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended", kw_only=True):
    code: int  # exit code of the program; 0 where it was stopped after its steps
    trained: bool  # whether a parameter has changed, or a gradient was not zero
    fitted: tuple[str, ...]  # modules and steps; in the plain run those that the other run fits
    budget_bytes: int | None  # None: unknown
    peak_bytes: int | None  # the most bytes held from `fit` on
    seconds: float  # of the whole run
    failure: Failure | None = None


Event: TypeAlias = Line | Step | Generator | Ended


class Record:
    """Events of one run, in a file.

    Processes that are forked from the process of the run write nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer_pid = os.getpid()
        self._encoder = msgspec.json.Encoder()

    def add(self, event: Event) -> None:
        if os.getpid() == self._writer_pid:
            with self.path.open("ab") as file:
                file.write(self._encoder.encode(event) + b"\n")

    def __iter__(self) -> Iterator[Event]:
        decoder = msgspec.json.Decoder(Event)
        if self.path.exists():
            with self.path.open("rb") as file:
                for text in file:
                    yield decoder.decode(text)

    def ended(self) -> Ended | None:
        """Return how the run ended; None if its process died."""
        return next((event for event in self if isinstance(event, Ended)), None)


class Difference(msgspec.Struct, frozen=True):
    """A place where two runs differ."""

    index: int  # of the event
    step: int  # the optimizer step, or the last before it
    kind: Literal["tensor", "line", "generator", "order"]  # order: the events are not alike
    name: str  # of the first tensor or of the generator; else the event of each run
    others: int = 0  # further tensors that differ after the same step


def differences(a: Record, b: Record) -> Iterator[Difference]:
    """Yield where two runs differ, up to the first event that only one of them has."""
    step = 0
    for index, (event_a, event_b) in enumerate(itertools.zip_longest(a, b)):
        if isinstance(event_a, Step):
            step = event_a.number
        compared = event_a, event_b
        if isinstance(event_a, Generator) != isinstance(event_b, Generator):
            compared = _or_end(a, event_a), _or_end(b, event_b)  # generators precede the end
        found = _difference(index, step, *compared)
        if found is not None:
            yield found
            if found.kind == "order":
                return


def _difference(index: int, step: int, a: Event | None, b: Event | None) -> Difference | None:
    if isinstance(a, Line) and isinstance(b, Line):
        if a.text == b.text:
            return None
        return Difference(index, step, "line", f"{_short(a.text)} and {_short(b.text)}")
    if isinstance(a, Step) and isinstance(b, Step) and a.optimizer == b.optimizer:
        names = [n for n in {**a.digests, **b.digests} if a.digests.get(n) != b.digests.get(n)]
        return Difference(index, step, "tensor", names[0], len(names) - 1) if names else None
    if isinstance(a, Generator) and isinstance(b, Generator) and a.name == b.name:
        return None if a == b else Difference(index, step, "generator", a.name)
    if isinstance(a, Ended) and isinstance(b, Ended) and _same_end(a, b):
        return None
    return Difference(index, step, "order", f"{_described(a)}, the other one {_described(b)}")


def _or_end(record: Record, event: Event | None) -> Event | None:
    return record.ended() if isinstance(event, Generator) else event


def _same_end(a: Ended, b: Ended) -> bool:
    return a.code == b.code and a.failure == b.failure


def _described(event: Event | None) -> str:
    """Describe the next event of a run, in words that follow "one run"."""
    if isinstance(event, Line):
        return f"prints {_short(event.text)}"
    if isinstance(event, Step):
        return f"takes step {event.number} ({event.optimizer})"
    if isinstance(event, Generator) or event is None:
        return "is over"
    if event.failure is not None:
        return f"ends with {event.failure.kind}: {event.failure.message}"
    return f"ends with code {event.code}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "...")
