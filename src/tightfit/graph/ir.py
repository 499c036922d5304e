"""The graph of a training step as frozen values.

A graph lists *values* (storages) and *ops* (executions of operators) of one step, forward and
backward together, in one valid order. Views never appear: they belong to the storage they view.
Ids are positions: ``graph.values[i].id == i`` and ``graph.ops[j].id == j``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from tightfit.units import rounded_up

FORMAT = 1

ValueId: TypeAlias = int
OpId: TypeAlias = int
SegmentId: TypeAlias = int
Role: TypeAlias = Literal[
    "computed", "parameter", "buffer", "input", "tangent", "gradient", "state"
]
Fate: TypeAlias = Literal["none", "returned", "handed_over", "written_back"]
Phase: TypeAlias = Literal["forward", "backward"]
Gradients: TypeAlias = Literal["fresh", "accumulated"]
Use: TypeAlias = Literal["any", "first", "again"]
Exactness: TypeAlias = Literal["bitwise", "rounding", "lossy"]
EXACTNESS: tuple[Exactness, ...] = ("bitwise", "rounding", "lossy")
"""How exact an alternative may be, the strictest first; each class includes those before it."""

CONSTANT_ROLES: dict[str, str] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "inputs",
    "state": "states",
}
"""The roles of constants, each with the key of `Graph.constants_bytes` that counts it."""


class _Frozen(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A frozen record whose JSON form leaves out defaults and refuses unknown fields."""


class Value(_Frozen, frozen=True):
    """One storage."""

    id: ValueId  # its position in ``graph.values``
    name: str  # a name for people: of the parameter, or of the operator that makes it
    size_bytes: int  # bytes, rounded as the device's allocator rounds
    # Its role. Parameters, buffers, inputs and states are *constants*: resident the whole step,
    # counted in ``graph.constants_bytes`` and never allocated or freed by a plan. A tangent appears
    # when the first backward segment of its program is entered. A gradient is computed by an op and
    # handed over. Everything else is ``"computed"``.
    role: Role = "computed"
    # ``"returned"``: the caller keeps it to the end of the step. ``"handed_over"``: a finished
    # gradient that leaves by a `HandOver`. ``"written_back"``: the new content of the buffer or
    # input `replaces`, copied there and freed when the segment that computes it ends.
    fate: Fate = "none"
    replaces: ValueId | None = None  # the constant a written-back value replaces
    segment: SegmentId | None = None  # for tangents: the segment at whose entry it appears
    # Cannot be moved to far memory: a record of an opaque module, which is no tensor, or what is on
    # the CPU amid a step on a GPU
    stays: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether it is resident the whole step."""
        return self.role in CONSTANT_ROLES

    def stays_to_end(self, gradients: Gradients) -> bool:
        """Whether it is alive from its first computation to the end of the step."""
        return self.fate == "returned" or (self.fate == "handed_over" and gradients == "fresh")


class Variant(_Frozen, frozen=True):
    """One point of an alternative's workspace-time trade-off: same reads, same bits."""

    cost_s: float = 0.0
    workspace_bytes: int = 0


class Alternative(_Frozen, frozen=True):
    """One way to compute an op."""

    # reads, writes: ids of the values it needs alive and of the values it makes. An alternative may
    # write more (a mask) or less (a recomputation without the statistics) than the default.
    reads: tuple[ValueId, ...]
    writes: tuple[ValueId, ...]
    name: str = "default"  # ``"default"`` for the first, else such as ``"relu.from_bits"``
    # The read value whose storage the first written one takes over (equal sizes); that value is
    # gone afterwards
    overwrites: ValueId | None = None
    variants: tuple[Variant, ...] = (Variant(),)  # at least one
    # ``"first"``: only for the first computation of the op in a step; ``"again"``: only for later
    # ones; ``"any"``: both
    use: Use = "any"
    exactness: Exactness = "bitwise"  # how its bits compare with the default's
    flops: int | None = None  # floating-point operations, if it does not do those of the op

    @property
    def cheapest(self) -> int:
        """The number of its cheapest variant."""
        return min(range(len(self.variants)), key=lambda v: self.variants[v].cost_s)

    @property
    def least_cost_s(self) -> float:
        return self.variants[self.cheapest].cost_s


class Op(_Frozen, frozen=True):
    """One execution of an operator."""

    id: OpId  # its position in ``graph.ops``
    target: str  # the operator, such as ``"aten.relu"``
    alternatives: tuple[Alternative, ...]  # the default first
    module: str = ""  # the module that called it, such as ``"layer3.0.act"``
    segment: SegmentId = 0  # the segment in which it is computed first
    partner: OpId | None = None  # for a backward op: the forward op it differentiates
    required: bool = True  # False: computed only if it is read (a mask, pool offsets)
    pinned: str | None = None  # why it may not be computed again, or None
    # Bytes of random-number state kept from the first to the last computation, if it is computed
    # more than once
    random_state_bytes: int = 0
    flops: int = 0  # floating-point operations, for modelled costs
    # Constants that it writes over: nothing reads them after it. Such an op runs once.
    changes: tuple[ValueId, ...] = ()

    def flops_of(self, alternative: Alternative) -> int:
        """Return the floating-point operations of one of its alternatives."""
        return self.flops if alternative.flops is None else alternative.flops


class Segment(_Frozen, frozen=True):
    """A stretch of a step that runs without returning to user code."""

    id: SegmentId  # its position in ``graph.segments``; segments are entered in this order
    phase: Phase  # ``"forward"`` or ``"backward"``
    # The captured program it belongs to. An op is recomputed only in segments of its program.
    program: int = 0
    # The most that user code holds while control passes into this segment (the loss and what it
    # saves, tangents included)
    outside_bytes: int = 0


class Choice(_Frozen, frozen=True):
    """Linked alternatives: exactly one branch is taken as a whole.

    A branch is a tuple of (op, alternative) pairs.
    """

    branches: tuple[tuple[tuple[OpId, int], ...], ...]


class Device(_Frozen, frozen=True):
    """Where the step runs and how its allocator rounds."""

    kind: str = "cpu"  # ``"cpu"``, ``"cuda"``, or the name of a modelled device such as ``"a100"``
    granularity_bytes: int = 1  # sizes are multiples of this
    name: str = ""  # a name for people

    def rounded(self, size_bytes: int) -> int:
        """Return the bytes that the allocator takes for a size."""
        return rounded_up(size_bytes, self.granularity_bytes)


class Graph(_Frozen, frozen=True):
    """A training step: values, ops in one valid order, segments."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    segments: tuple[Segment, ...] = (Segment(id=0, phase="forward"),)
    choices: tuple[Choice, ...] = ()
    # Bytes resident the whole step, by kind: at least the parameters, buffers, inputs and states
    # among `values`; also gradients and optimizer state that exist
    constants_bytes: dict[str, int] = {}
    device: Device = Device()
    name: str = ""
    # Where costs come from (``"unit"``, ``"roofline:a100"``, ``"measured"``), for people
    cost_source: str = ""
    format: int = FORMAT

    @property
    def constant_bytes(self) -> int:
        """The bytes resident the whole step."""
        return sum(self.constants_bytes.values())

    def bytes_of(self, values: Iterable[ValueId]) -> int:
        return sum(self.values[value].size_bytes for value in values)

    @property
    def handed_over_bytes(self) -> int:
        """Bytes of the gradients that a plan hands over."""
        return sum(value.size_bytes for value in self.values if value.fate == "handed_over")

    @property
    def returned_bytes(self) -> int:
        return sum(value.size_bytes for value in self.values if value.fate == "returned")

    @property
    def tangent_bytes(self) -> int:
        return sum(value.size_bytes for value in self.values if value.role == "tangent")

    def taken_over_bytes(self, alternative: Alternative) -> int:
        """Return the bytes of the storage that an alternative takes over, if any."""
        target = alternative.overwrites
        return 0 if target is None else self.values[target].size_bytes

    def with_constants(self, **sizes_bytes: int) -> Graph:
        """Return the graph with further kinds of constants."""
        return msgspec.structs.replace(
            self, constants_bytes={**self.constants_bytes, **sizes_bytes}
        )

    def with_outside(self, outside_bytes: int) -> Graph:
        """Return the graph with the bytes of user code when backward is entered."""
        segments = tuple(
            msgspec.structs.replace(s, outside_bytes=outside_bytes) if s.phase == "backward" else s
            for s in self.segments
        )
        return msgspec.structs.replace(self, segments=segments)
