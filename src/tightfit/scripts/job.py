"""The request to a process that runs a program."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tightfit.errors import BadInput


class RequestedTensor(msgspec.Struct, frozen=True):
    """A tensor to write into a file: its name, the step after which, and the file."""

    name: str
    step: int
    path: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a program."""

    # ``"plain"``: modules that the program fits are left plain; or ``"fitted"``
    way: Literal["plain", "fitted"]
    # script, arguments: the program and its arguments
    script: str
    arguments: tuple[str, ...]
    steps: int  # optimizer steps after which it is stopped, before the next
    budget_bytes: int | None  # the budget in place of the program's own
    keywords: dict[str, Any]  # of `tightfit.fit`, where the program fits nothing itself
    threads: int | None  # threads of PyTorch
    # record, answers: files: the record of the run, and tightfit's answers to the fitted program
    record: str
    answers: str
    wanted: RequestedTensor | None = None  # a tensor that is asked for


class CannotProve(BadInput):
    """A program that allows no proof as it is, or as it is asked for."""


class EnoughSteps(BaseException):
    """Ends a program after its steps; no error, so that programs that catch errors end, too."""
