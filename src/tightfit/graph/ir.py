"""The graph of a training step as frozen values.

A graph lists *values* (storages) and *ops* (executions of operators) of one step, forward and
backward together, in one valid order. Views never appear: they belong to the storage they view.
Ids are positions: ``graph.values[i].id == i`` and ``graph.ops[j].id == j``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tightfit.units import rounded_up

__all__ = [
    "CONSTANT_ROLES",
    "FORMAT",
    "Alternative",
    "Choice",
    "Device",
    "Exactness",
    "Fate",
    "Graph",
    "Op",
    "OpId",
    "Phase",
    "Role",
    "Segment",
    "SegmentId",
    "Use",
    "Value",
    "ValueId",
    "Variant",
]

FORMAT = 1

ValueId: TypeAlias = int
OpId: TypeAlias = int
SegmentId: TypeAlias = int
Role: TypeAlias = Literal[
    "computed", "parameter", "buffer", "input", "tangent", "gradient", "state"
]
Fate: TypeAlias = Literal["none", "returned", "handed_over", "written_back"]
Phase: TypeAlias = Literal["forward", "backward"]
Use: TypeAlias = Literal["any", "first", "again"]
Exactness: TypeAlias = Literal["bitwise", "rounding", "lossy"]
EXACTNESS: tuple[Exactness, ...] = ("bitwise", "rounding", "lossy")
"""How exact an alternative may be, the strictest first; each class includes those before it."""

CONSTANT_ROLES: frozenset[str] = frozenset({"parameter", "buffer", "input", "state"})


class _Frozen(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A frozen record whose JSON form leaves out defaults and refuses unknown fields."""


class Value(_Frozen, frozen=True):
    """One storage.

    Parameters
    ----------
    id : int
        Its position in ``graph.values``.
    name : str
        A name for people: of the parameter, or of the operator that makes it.
    size_bytes : int
        Bytes, rounded as the device's allocator rounds.
    role : str
        What it is. Parameters, buffers, inputs and states are *constants*: resident the whole
        step, counted in ``graph.constants_bytes`` and never allocated or freed by a plan.
        A tangent appears when the first backward segment of its program is entered. A gradient
        is computed by an op and handed over. Everything else is ``"computed"``.
    fate : str
        ``"returned"``: the caller keeps it to the end of the step. ``"handed_over"``: a finished
        gradient that leaves by a `HandOver`. ``"written_back"``: the new content of the buffer
        or input `replaces`, copied there and freed when the segment that computes it ends.
    replaces : int or None
        The constant a written-back value replaces.
    segment : int or None
        For tangents: the segment at whose entry it appears.
    stays : bool
        Whether it cannot be moved to far memory: a record of an opaque module is no tensor.
    """

    id: ValueId
    name: str
    size_bytes: int
    role: Role = "computed"
    fate: Fate = "none"
    replaces: ValueId | None = None
    segment: SegmentId | None = None
    stays: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether it is resident the whole step."""
        return self.role in CONSTANT_ROLES


class Variant(_Frozen, frozen=True):
    """One point of an alternative's workspace-time trade-off: same reads, same bits."""

    cost_s: float = 0.0
    workspace_bytes: int = 0


class Alternative(_Frozen, frozen=True):
    """One way to compute an op.

    Parameters
    ----------
    name : str
        ``"default"`` for the first one, else such as ``"relu.mask1"``.
    reads, writes : tuple of int
        Ids of the values it needs alive and of the values it makes. An alternative may write
        more (a mask) or less (a recomputation without the statistics) than the default.
    overwrites : int or None
        The read value whose storage the first written one takes over (equal sizes); that value
        is gone afterwards.
    variants : tuple of Variant
        At least one.
    use : str
        ``"first"``: only for the first computation of the op in a step; ``"again"``: only for
        later ones; ``"any"``: both.
    exactness : str
        How its bits compare with the default's.
    flops : int or None
        Floating-point operations, if it does not do those of the op.
    """

    reads: tuple[ValueId, ...]
    writes: tuple[ValueId, ...]
    name: str = "default"
    overwrites: ValueId | None = None
    variants: tuple[Variant, ...] = (Variant(),)
    use: Use = "any"
    exactness: Exactness = "bitwise"
    flops: int | None = None


class Op(_Frozen, frozen=True):
    """One execution of an operator.

    Parameters
    ----------
    id : int
        Its position in ``graph.ops``.
    target : str
        The operator, such as ``"aten.relu"``.
    alternatives : tuple of Alternative
        The default first.
    module : str
        The module that called it, such as ``"layer3.0.act"``.
    segment : int
        The segment in which it is computed first.
    partner : int or None
        For a backward op: the forward op it differentiates.
    required : bool
        False: computed only if somebody reads it (a mask, pool offsets).
    pinned : str or None
        Why it may not be computed again, or None.
    random_state_bytes : int
        Bytes of random-number state kept from the first to the last computation, if it is
        computed more than once.
    flops : int
        Floating-point operations, for modelled costs.
    changes : tuple of int
        Constants that it writes over: nothing reads them after it. Such an op runs once.
    """

    id: OpId
    target: str
    alternatives: tuple[Alternative, ...]
    module: str = ""
    segment: SegmentId = 0
    partner: OpId | None = None
    required: bool = True
    pinned: str | None = None
    random_state_bytes: int = 0
    flops: int = 0
    changes: tuple[ValueId, ...] = ()

    def flops_of(self, alternative: Alternative) -> int:
        """Return the floating-point operations of one of its alternatives."""
        return self.flops if alternative.flops is None else alternative.flops


class Segment(_Frozen, frozen=True):
    """A stretch of a step that runs without returning to user code.

    Parameters
    ----------
    id : int
        Its position in ``graph.segments``; segments are entered in this order.
    phase : str
        ``"forward"`` or ``"backward"``.
    program : int
        The captured program it belongs to. An op is recomputed only in segments of its program.
    outside_bytes : int
        The most that user code holds while control passes into this segment (the loss and what
        it saves, tangents included).
    """

    id: SegmentId
    phase: Phase
    program: int = 0
    outside_bytes: int = 0


class Choice(_Frozen, frozen=True):
    """Linked alternatives: exactly one branch is taken as a whole.

    A branch is a tuple of (op, alternative) pairs.
    """

    branches: tuple[tuple[tuple[OpId, int], ...], ...]


class Device(_Frozen, frozen=True):
    """Where the step runs and how its allocator rounds.

    Parameters
    ----------
    kind : str
        ``"cpu"``, ``"cuda"``, or the name of a modelled device such as ``"a100"``.
    granularity_bytes : int
        Sizes are multiples of this.
    name : str
        A name for people.
    """

    kind: str = "cpu"
    granularity_bytes: int = 1
    name: str = ""

    def rounded(self, size_bytes: int) -> int:
        """Return what the allocator takes for a size."""
        return rounded_up(size_bytes, self.granularity_bytes)


class Graph(_Frozen, frozen=True):
    """A training step: values, ops in one valid order, segments.

    Parameters
    ----------
    constants_bytes : dict of str to int
        What is resident the whole step, by kind: at least the parameters, buffers, inputs and
        states among `values`; also gradients and optimizer state that exist.
    cost_source : str
        Where costs come from (``"unit"``, ``"roofline:a100"``, ``"measured"``), for people.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    segments: tuple[Segment, ...] = (Segment(id=0, phase="forward"),)
    choices: tuple[Choice, ...] = ()
    constants_bytes: dict[str, int] = {}
    device: Device = Device()
    name: str = ""
    cost_source: str = ""
    format: int = FORMAT

    @property
    def constant_bytes(self) -> int:
        """The bytes resident the whole step."""
        return sum(self.constants_bytes.values())

    def with_constants(self, **sizes_bytes: int) -> Graph:
        """Return the graph with further kinds of constants."""
        return msgspec.structs.replace(
            self, constants_bytes={**self.constants_bytes, **sizes_bytes}
        )

    def with_outside(self, outside_bytes: int) -> Graph:
        """Return the graph with what user code holds when backward is entered."""
        segments = tuple(
            msgspec.structs.replace(s, outside_bytes=outside_bytes) if s.phase == "backward" else s
            for s in self.segments
        )
        return msgspec.structs.replace(self, segments=segments)
