"""Answers of tightfit about its plans: the plain run gets those of the fitted run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from tightfit.errors import BadInput, TightfitError
from tightfit.scripts.job import EnoughSteps

Answers: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Answers a question of the program: returns the answer, or raises the error that it is."""


class RecordedAnswers:
    """Answers as tightfit does; keeps the answers in a file."""

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
    """Answers as the fitted program was answered, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def __call__(self, ask: Callable[[], Any]) -> Any:
        """Return the next answer, or raise the error that it is."""
        del ask
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                answer, error = pickle.load(file)
                self._read_bytes = file.tell()
        except (EOFError, FileNotFoundError):
            raise EnoughSteps from None  # the fitted run was over before it asked so often
        if error is not None:
            raise BadInput(error)
        return answer
