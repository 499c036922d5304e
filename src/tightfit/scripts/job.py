"""The request to a process that runs a program."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tightfit.errors import BadInput


class RequestedTensor(msgspec.Struct, frozen=True):
    """A tensor to write into a file after a step."""

    name: str
    step: int
    path: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a program."""

    mode: Literal["plain", "fitted"]  # plain: nothing is fitted, not even by the program itself
    script: str
    arguments: tuple[str, ...]
    steps: int  # optimizer steps after which it is stopped, before the next
    budget_bytes: int | None  # replaces the program's own budgets
    keywords: dict[str, Any]  # of `tightfit.fit`, where the program fits nothing itself
    threads: int | None  # of PyTorch
    record: str  # a file
    answers: str  # a file with results that tightfit's functions gave the fitted program
    requested: RequestedTensor | None = None


class CannotProve(BadInput):
    """A program that cannot be proven as it is, or with these options."""


class EnoughSteps(BaseException):
    """Ends a program after its steps; no `Exception`, which the program might catch."""
