"""A plan as a frozen value: a straight list of instructions for one step."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tightfit.graph.ir import OpId, SegmentId, ValueId

__all__ = [
    "FORMAT",
    "Compute",
    "Enter",
    "Free",
    "Gradients",
    "HandOver",
    "Instruction",
    "Outcome",
    "Plan",
    "Status",
]

FORMAT = 1

Gradients: TypeAlias = Literal["fresh", "accumulated"]
Status: TypeAlias = Literal["optimal", "feasible", "infeasible", "unknown", "error"]


class Compute(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="do",
    tag="compute",
):
    """Run one op with the given alternative and variant of it.

    Values it writes that are still alive keep their old instance; the new one is temporary.
    """

    op: OpId
    alternative: int = 0
    variant: int = 0


class Free(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="free"):
    """Release a value."""

    value: ValueId


class HandOver(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="hand_over"
):
    """Pass finished gradients to their owners.

    With fresh gradients they stay alive to the end of the step; with accumulated ones they are
    added to the existing gradients and freed here.
    """

    values: tuple[ValueId, ...]


class Enter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag="enter"):
    """Cross into a segment; what user code holds counts while crossing."""

    segment: SegmentId


Instruction: TypeAlias = Compute | Free | HandOver | Enter


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to compute, recompute and free, in which order, for one step of one graph.

    Parameters
    ----------
    graph : str
        Fingerprint of the graph it was made for.
    budget_bytes : int
        The budget it keeps, constants included.
    gradients : str
        Whether gradients are ``"fresh"`` (activations of the step) or ``"accumulated"`` into
        existing ones (constants).
    instructions : tuple of Instruction
        The order of the plan is the order of its first computes.
    """

    graph: str
    budget_bytes: int
    instructions: tuple[Instruction, ...]
    gradients: Gradients = "fresh"
    format: int = FORMAT


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a planner found.

    Parameters
    ----------
    plan : Plan or None
        The best verified plan, if any.
    overhead : float
        (cost of the plan / cost with nothing recomputed and default alternatives) - 1;
        ``inf`` without a plan.
    bound : float
        A proven lower bound on the overhead at this budget; ``inf`` if infeasibility is proven.
    bound_source : str
        Where the bound comes from, such as ``"trivial"`` or ``"K-cut"``.
    status : str
        ``"optimal"``: the gap is closed. ``"feasible"``: a plan, an open gap. ``"infeasible"``:
        proven that no plan exists. ``"unknown"``: no plan found and no proof.
    seconds : float
        Wall time spent.
    peak_bytes : int
        The simulated peak of the plan, constants included; 0 without a plan.
    note : str
        Anything a person should know.
    """

    plan: Plan | None
    overhead: float
    bound: float
    bound_source: str
    status: Status
    seconds: float
    peak_bytes: int = 0
    note: str = ""

    @property
    def gap(self) -> float:
        """Overhead minus bound; ``inf`` without a plan."""
        return self.overhead - self.bound if self.plan is not None else float("inf")
