"""Results of `tightfit.report` and `prepare`: the plain run returns those of the fitted run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from tightfit.errors import BadInput, TightfitError
from tightfit.scripts.job import EnoughSteps

Answers: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Runs a function of tightfit's, or returns a recorded result or raises a recorded error."""


class RecordedAnswers:
    """Runs each function; writes its result or its error into a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, ask: Callable[[], Any]) -> Any:
        try:
            answer = ask()
        except TightfitError as error:
            self._keep((None, str(error)))
            raise
        self._keep((answer, None))
        return answer

    def _keep(self, answer: tuple[Any, str | None]) -> None:
        with self._path.open("ab") as file:
            pickle.dump(answer, file)


class RepeatedAnswers:
    """Runs nothing: gives the recorded results and errors in their order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def __call__(self, ask: Callable[[], Any]) -> Any:
        del ask
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                answer, error = pickle.load(file)
                self._read_bytes = file.tell()
        except (EOFError, FileNotFoundError):
            raise EnoughSteps from None  # the fitted run ended before so many calls
        if error is not None:
            raise BadInput(error)
        return answer
