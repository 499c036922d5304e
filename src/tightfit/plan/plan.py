"""A plan as a frozen value: a straight list of instructions for one step."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tightfit.graph.ir import Alternative, Gradients, Graph, OpId, SegmentId, ValueId

FORMAT = 1

Status: TypeAlias = Literal["optimal", "feasible", "infeasible", "unknown", "error"]


class _Tagged(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="do"
):
    """An instruction, whose kind is in the field ``do`` of its JSON form."""


class Compute(_Tagged, frozen=True, tag="compute"):
    """Run one op with the given alternative and variant of it.

    Values it writes that are still alive keep their old instance; the new instance is temporary.
    """

    op: OpId
    alternative: int = 0
    variant: int = 0

    def alternative_in(self, graph: Graph) -> Alternative:
        return graph.ops[self.op].alternatives[self.alternative]

    def cost_s(self, graph: Graph) -> float:
        return self.alternative_in(graph).variants[self.variant].cost_s


class Free(_Tagged, frozen=True, tag="free"):
    """Release a value; if it is being stored or loaded, wait for that first."""

    value: ValueId


class HandOver(_Tagged, frozen=True, tag="hand_over"):
    """Pass finished gradients to their owners.

    With fresh gradients they stay alive to the end of the step; with accumulated ones they are
    added to the existing gradients and freed here.
    """

    values: tuple[ValueId, ...]


class Enter(_Tagged, frozen=True, tag="enter"):
    """Cross into a segment; memory of user code counts while crossing."""

    segment: SegmentId


class Store(_Tagged, frozen=True, tag="store"):
    """Begin to copy a value to far memory, behind the stores begun before; ops go on meanwhile.

    Its place in near memory stays taken until a `Free`, which waits for the end of the copy.
    """

    value: ValueId


class Load(_Tagged, frozen=True, tag="load"):
    """Begin to bring a stored value back, behind the loads begun before; ops go on meanwhile.

    It takes near memory from here on; its first reader waits for its end. The copy in far
    memory lasts until the value's last load has ended.
    """

    value: ValueId


Instruction: TypeAlias = Compute | Free | HandOver | Enter | Store | Load


class Far(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Memory behind a link: a host's memory or a file, with one queue in each direction."""

    capacity_bytes: int  # the limit of a step there
    # store_bytes_per_s, load_bytes_per_s: how fast the link is, to far memory and back
    store_bytes_per_s: float
    load_bytes_per_s: float
    latency_s: float = 0.0  # added to each transfer

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        if self.capacity_bytes < 0 or self.latency_s < 0:
            raise ValueError("far memory has neither a negative capacity nor a negative latency")
        if not (self.store_bytes_per_s > 0 and self.load_bytes_per_s > 0):
            raise ValueError("a link to far memory moves more than 0 bytes a second each way")

    def store_s(self, size_bytes: int) -> float:
        """Return how long it takes to store so many bytes."""
        return self.latency_s + size_bytes / self.store_bytes_per_s

    def load_s(self, size_bytes: int) -> float:
        """Return how long it takes to load so many bytes."""
        return self.latency_s + size_bytes / self.load_bytes_per_s


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The instructions of one step of one graph: compute, recompute, free, in order."""

    graph: str  # fingerprint of the graph it was made for
    budget_bytes: int  # the budget it keeps, constants included
    # The order of the plan is the order of its first computes
    instructions: tuple[Instruction, ...]
    # Whether gradients are ``"fresh"`` (activations of the step) or ``"accumulated"`` into existing
    # ones (constants)
    gradients: Gradients = "fresh"
    format: int = FORMAT
    # The far memory that its stores and loads use; a plan without one moves nothing
    far: Far | None = None

    @property
    def computes(self) -> list[Compute]:
        """Its computations in order, the first and the later ones."""
        return [step for step in self.instructions if isinstance(step, Compute)]

    def last_computes(self) -> dict[OpId, int]:
        """Return the instruction that computes each op last."""
        numbered = enumerate(self.instructions)
        return {step.op: index for index, step in numbered if isinstance(step, Compute)}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a planner."""

    plan: Plan | None  # the best verified plan, if any
    # (cost of the plan / cost with nothing recomputed and default alternatives) - 1; ``inf``
    # without a plan
    overhead: float
    # A proven lower bound on the overhead at this budget; ``inf`` if infeasibility is proven
    bound: float
    bound_source: str  # where the bound comes from, such as ``"trivial"`` or ``"K-cut"``
    # ``"optimal"``: the gap is closed. ``"feasible"``: a plan, an open gap. ``"infeasible"``:
    # proven that no plan exists. ``"unknown"``: no plan found and no proof.
    status: Status
    seconds: float  # wall time spent
    peak_bytes: int = 0  # the simulated peak of the plan, constants included; 0 without a plan
    note: str = ""  # anything a person should know

    @property
    def gap(self) -> float:
        """Overhead minus bound; ``inf`` without a plan."""
        return self.overhead - self.bound if self.plan is not None else float("inf")
