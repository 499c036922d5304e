"""What is captured of a callee, by signature and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tightfit.capture.calls.signature import differ_in_sizes_only

if TYPE_CHECKING:
    pass
import warnings

from torch import nn

from tightfit.capture.calls.signature import hooked_modules
from tightfit.session.whole.specialisation import Shape

__all__ = ["forget_oldest", "most_alike", "warn_of_hooks"]


_MOST_NAMED = 4


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


_MOST_SHAPES = 16


def most_alike(known: dict[Any, list[Shape]], key: Any) -> Any | None:
    """Return the signature of the same call on other sizes or answers, its own costs preferred."""
    alike = [
        (not shape.is_further, shape.used, other)
        for other, shapes in known.items()
        for shape in shapes
        if other == key or differ_in_sizes_only(other, key)
    ]
    return max(alike, key=lambda one: one[:2])[2] if alike else None


def forget_oldest(known: dict[Any, list[Shape]]) -> None:
    """Keep no more than some shapes, by signature: those used last."""
    while len(shapes := [shape for alike in known.values() for shape in alike]) > _MOST_SHAPES:
        oldest = min(shapes, key=lambda shape: shape.used)
        oldest.forget_plans()
        for key, alike in list(known.items()):
            known[key] = [shape for shape in alike if shape is not oldest]
            if not known[key]:
                del known[key]
