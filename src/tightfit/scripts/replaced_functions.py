"""Replacements for the functions of tightfit that a program calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tightfit
from tightfit.api import backend as backend_file
from tightfit.api import fit as fit_file
from tightfit.api import online as online_file
from tightfit.arenas.arena import Arena
from tightfit.dynamic.region import Online
from tightfit.scripts.answers import Answers
from tightfit.scripts.fitter import Fitter
from tightfit.torch_private.patches import replaced


class _PlainRegion:
    """Replaces a region of `tightfit.online` in a plain run."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def __enter__(self) -> _PlainRegion:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def evict(self, size: int | str) -> None:
        pass

    def keep(self, *tensors: Any) -> None:
        pass

    def wait(self, seconds: float | None = None) -> None:
        pass

    def report(self) -> Any:
        return self._answers(lambda: None)


@contextlib.contextmanager
def replaced_functions(fitter: Fitter, answers: Answers, *, is_plain: bool) -> Iterator[None]:
    """Have the program call `fitter` and `answers` instead of tightfit's functions."""

    def answered(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: answers(lambda: original(*args, **kwargs))

    original_online, original_backend = online_file.online, backend_file.backend

    def online(budget: int | str, **keywords: Any) -> Any:
        fitter.enter_region(budget)
        return _PlainRegion(answers) if is_plain else original_online(budget, **keywords)

    def backend(module: Any, example_inputs: Any, **keywords: Any) -> Any:
        budget = (keywords.get("options") or {}).get("budget")
        if budget is not None:
            fitter.compile_graph(budget)
        if is_plain:
            return module.forward
        return original_backend(module, example_inputs, **keywords)

    functions: dict[str, Any] = {
        "fit": fitter.fit,
        "step": fitter.step,
        "unfit": fitter.unfit,
        "prepare": answered(fit_file.prepare),
        "report": answered(fit_file.report),
    }
    with contextlib.ExitStack() as around:
        around.enter_context(replaced(tightfit, online=online, **functions))
        around.enter_context(replaced(fit_file, **functions))
        around.enter_context(replaced(online_file, online=online))
        around.enter_context(replaced(backend_file, backend=backend))
        for kind in (Online, Arena):
            around.enter_context(replaced(kind, report=answered(kind.report)))
        yield
