"""Capturing a step of a session: around what data decides, with a word on hooks."""

from __future__ import annotations

import dataclasses
import warnings

from torch import nn

from tightfit.api.options import Options
from tightfit.api.pipeline import capture_step
from tightfit.capture.joint import TracedCall
from tightfit.capture.lift import Captured
from tightfit.capture.signature import hooked_modules
from tightfit.errors import CaptureError
from tightfit.execution.guard import announce
from tightfit.graph.ir import Graph

__all__ = ["capture_around_data", "warn_of_hooks"]

_MOST_NAMED = 4


def capture_around_data(
    call: TracedCall, options: Options, name: str, neighbour: Graph | None = None
) -> tuple[Captured, frozenset[str]]:
    """Capture a step; modules in which data decides what runs become one op each.

    Returns
    -------
    captured : Captured
        The step.
    opaque : frozenset of str
        The modules that are one op now.

    Raises
    ------
    CaptureError
        If data decides in the outermost forward, or the step cannot be captured otherwise.
    """
    while True:
        try:
            return capture_step(call, options, name, neighbour), call.opaque
        except CaptureError as error:
            if not error.depends_on_data or not error.module or error.module in call.opaque:
                raise
            call = dataclasses.replace(call, opaque=call.opaque | {error.module})
            announce(
                f"what module {error.module!r} runs depends on data: it runs eagerly, as one "
                "measured op of the plan (tightfit.opaque says so beforehand)"
            )


def warn_of_hooks(modules: dict[str, nn.Module], root: nn.Module | None, warned: set[str]) -> None:
    """Name the inner modules whose hooks become part of the captured step, once."""
    names = [n for n, _ in hooked_modules(modules, root) if n not in warned]
    if not names:
        return
    warned.update(names)
    named = ", ".join(map(repr, names[:_MOST_NAMED]))
    if len(names) > _MOST_NAMED:
        named += f" and {len(names) - _MOST_NAMED} more"
    warnings.warn(
        f"hooks on module {named} are captured with the step: their operators run every step, "
        "their Python code does not run again. Adding or removing a hook makes a new plan",
        stacklevel=6,
    )
