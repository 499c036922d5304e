"""What a process of its own is asked to run."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tightfit.errors import BadInput

__all__ = ["CannotProve", "EnoughSteps", "Job", "Wanted"]


class Wanted(msgspec.Struct, frozen=True):
    """A tensor to write into a file: its name, the step after which, and the file."""

    name: str
    step: int
    path: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a program.

    Parameters
    ----------
    way : str
        ``"plain"``: what the program fits is left plain; or ``"fitted"``.
    script, arguments : str, tuple of str
        The program and what it is given.
    steps : int
        Optimizer steps after which it is stopped, before the next one.
    budget_bytes : int or None
        The budget in place of the program's own.
    keywords : dict
        Of `tightfit.fit`, where the program fits nothing itself.
    threads : int or None
        Threads of PyTorch.
    record, answers : str
        Files: what the run leaves behind, and what tightfit has told the fitted program.
    wanted : Wanted or None
        A tensor that is asked for.
    """

    way: Literal["plain", "fitted"]
    script: str
    arguments: tuple[str, ...]
    steps: int
    budget_bytes: int | None
    keywords: dict[str, Any]
    threads: int | None
    record: str
    answers: str
    wanted: Wanted | None = None


class CannotProve(BadInput):
    """A program that allows no proof as it is, or as it is asked for."""


class EnoughSteps(BaseException):
    """Ends a program after its steps; no error, so that programs that catch errors end, too."""
