"""Errors a user may meet: what happened, the numbers, the cause, what to try next."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar


class TightfitError(Exception):
    """The base of every error that tightfit raises on purpose."""


class BadInput(TightfitError, ValueError):
    """An argument, file or option that cannot be used as it is."""


class InvalidGraph(BadInput):
    """A graph that breaks a rule of the format: a cycle, an unknown id, a wrong size."""


class InvalidPlan(BadInput):
    """A plan that the verifier refuses: it reads a freed value, exceeds its budget, ..."""


class InvalidLayout(BadInput):
    """A layout in which blocks that live together share bytes, or an offset is none."""


class PlanMismatch(BadInput):
    """A plan or an input that belongs to another graph, model or shape."""


class OpaqueChanged(PlanMismatch):
    """An opaque module kept more for backward than was measured; a new plan makes room."""


class OpaqueVaries(PlanMismatch):
    """An opaque module returned other tensors or numbers than when it was captured.

    Parameters
    ----------
    message : str
        Its result, and a way out.
    module : str
        Its name.
    """

    def __init__(self, message: str, *, module: str) -> None:
        super().__init__(message)
        self.module = module


class MissingExtra(TightfitError, ImportError):
    """An optional dependency that is not installed; the message has the pip command."""


class HookUnavailable(TightfitError, RuntimeError):
    """The allocator hook cannot be installed in this process; the message says why."""


class CaptureError(TightfitError):
    """A model that cannot be turned into a graph; names the module, the reason, a way out.

    Parameters
    ----------
    message : str
        The reason, and a way out.
    module : str or None
        The module whose code is the cause, where it is known; "": the outermost.
    """

    def __init__(self, message: str, *, module: str | None = None) -> None:
        super().__init__(message)
        self.module = module


WITHOUT_A_PLAN = (
    "Without a plan, on the CPU: train the plain model in `with tightfit.online(budget=...):`, "
    "which takes any program"
)
"""The way out for code that no plan can hold, as messages name it."""

Refusal = TypeVar("Refusal", bound=TightfitError)


def first_of(names: Sequence[str], most: int = 4) -> str:
    """Return names for a message: the first, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def no_plan_fits(name: str, budget: str, *, proven: bool) -> str:
    """Return the first line of a refusal; `proven`: whether it is proven that there is no plan."""
    known = "proven: there is none" if proven else "none was found"
    return f"no plan of {name} fits {budget} ({known})"


def with_another_way(error: Refusal, way: str) -> Refusal:
    """Return an error that names one more way out, and comes from where the first came."""
    message = f"{str(error).rstrip('.')}. {way}"
    extended = type(error).__new__(type(error), message)
    extended.__dict__.update(error.__dict__)
    return extended.with_traceback(error.__traceback__)


def as_user_sees_it(error: TightfitError) -> TightfitError:
    """Return an error as it leaves a fitted call: without frames of ours.

    With ``TIGHTFIT_FULL_TRACEBACK`` set the frames stay.
    """
    if os.environ.get("TIGHTFIT_FULL_TRACEBACK"):
        return error
    return error.with_traceback(None)


class CompileError(TightfitError):
    """A step that cannot be compiled; names the module, the reason, a way out."""


class NothingToTrain(CaptureError):
    """No parameter or input of the model needs a gradient."""


class InfeasibleBudget(TightfitError):
    """No plan fits the budget, or none was found.

    Parameters
    ----------
    message : str
        The budget asked for, the least, where, and what to try.
    budget_bytes : int
        The budget that was asked for.
    minimum_bytes : int or None
        The smallest budget for which a plan is known, if any.
    proven : bool
        True if it is proven that no plan exists for this order of operators.
    call_bytes : int or None
        The same for the call that was to be planned alone, where later ones are known to need
        more.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        minimum_bytes: int | None = None,
        proven: bool = False,
        call_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.call_bytes = minimum_bytes if call_bytes is None else call_bytes
        self.proven = proven


def without_frames(error: InfeasibleBudget) -> InfeasibleBudget:
    """Return the same error without the frames of where it was raised, which hold tensors."""
    return InfeasibleBudget(
        str(error),
        budget_bytes=error.budget_bytes,
        minimum_bytes=error.minimum_bytes,
        proven=error.proven,
        call_bytes=error.call_bytes,
    )


class BudgetExceeded(TightfitError):
    """A measured step held more bytes than the budget."""

    def __init__(self, message: str, *, budget_bytes: int, measured_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.measured_bytes = measured_bytes


class OffloadFailed(TightfitError, RuntimeError):
    """Far memory failed during a step: its disk is full, or no memory of the host can be pinned."""


class SecondForward(TightfitError, RuntimeError):
    """A planned forward was called while an earlier one still awaits its backward."""
