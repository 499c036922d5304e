"""The rules a graph must keep, checked in one place; everything else relies on them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tightfit.errors import InvalidGraph
from tightfit.graph.changes import need_before_changes
from tightfit.graph.ir import CONSTANT_ROLES, FORMAT, Alternative, Graph, Op, Value

_LARGEST_BYTES = 2**56


def validate_graph(graph: Graph) -> Graph:
    """Return the graph unchanged if it keeps every rule of the format.

    Raises `InvalidGraph`, which names the first broken rule and where. Rules are about ids
    (positions, all known), producers (one for each value), the order of ops (no cycle) and sizes
    (rounded, not negative). Others are about targets of written-back values, constants (counted,
    not needed after an op has changed them) and linked choices (no overlap).
    """
    if graph.format != FORMAT:
        raise InvalidGraph(
            f"graph format {graph.format} is not supported (this version reads {FORMAT})"
        )
    _check_device(graph)
    _check_segments(graph)
    for position, value in enumerate(graph.values):
        _check_value(graph, position, value)
    producers = _check_ops(graph)
    _check_producers(graph, producers)
    _check_changes(graph)
    _check_choices(graph)
    _check_constants(graph)
    return graph


def _check_device(graph: Graph) -> None:
    if graph.device.granularity_bytes < 1:
        raise InvalidGraph("device.granularity_bytes must be at least 1")


def _check_segments(graph: Graph) -> None:
    if not graph.segments:
        raise InvalidGraph("a graph needs at least one segment")
    for position, segment in enumerate(graph.segments):
        if segment.id != position:
            raise InvalidGraph(f"segment {segment.id} is at position {position}")
        if segment.outside_bytes < 0:
            raise InvalidGraph(f"segment {position}: outside_bytes is negative")


def _check_value(graph: Graph, position: int, value: Value) -> None:
    where = f"value {value.id} ({value.name!r})"
    if value.id != position:
        raise InvalidGraph(f"{where} is at position {position}; ids are positions")
    if not 0 <= value.size_bytes <= _LARGEST_BYTES:
        raise InvalidGraph(f"{where}: size_bytes {value.size_bytes} is out of range")
    if not value.is_constant and value.size_bytes % graph.device.granularity_bytes:
        raise InvalidGraph(
            f"{where}: size_bytes {value.size_bytes} is not a multiple of the device's "
            f"granularity of {graph.device.granularity_bytes} bytes"
        )
    if value.fate == "written_back":
        target = value.replaces
        if target is None or not 0 <= target < len(graph.values):
            raise InvalidGraph(f"{where} is written back but replaces no value of the graph")
        if not graph.values[target].is_constant:
            raise InvalidGraph(f"{where} replaces value {target}, which is no constant")
    elif value.replaces is not None:
        raise InvalidGraph(f"{where} replaces a value but its fate is {value.fate!r}")
    if value.fate == "handed_over" and value.role != "gradient":
        raise InvalidGraph(f"{where} is handed over but its role is {value.role!r}")
    if value.role == "tangent":
        if value.segment is None or not 0 <= value.segment < len(graph.segments):
            raise InvalidGraph(f"{where} is a tangent and must name the segment it appears in")
    elif value.segment is not None:
        raise InvalidGraph(f"{where}: only tangents name a segment")
    if value.is_constant and value.fate not in ("none", "returned"):
        raise InvalidGraph(f"{where} is a constant; its fate cannot be {value.fate!r}")


def _check_ops(graph: Graph) -> dict[int, int]:
    """Check every op; return the producer of each computed value."""
    producers: dict[int, int] = {}
    segment = 0
    for position, op in enumerate(graph.ops):
        where = f"op {op.id} ({op.target!r})"
        if op.id != position:
            raise InvalidGraph(f"{where} is at position {position}; ids are positions")
        if not 0 <= op.segment < len(graph.segments):
            raise InvalidGraph(f"{where}: segment {op.segment} does not exist")
        if op.segment < segment:
            raise InvalidGraph(f"{where} belongs to segment {op.segment} but follows {segment}")
        segment = op.segment
        if op.partner is not None and not 0 <= op.partner < position:
            raise InvalidGraph(f"{where}: its partner {op.partner} is no earlier op")
        if op.random_state_bytes < 0 or op.flops < 0:
            raise InvalidGraph(f"{where}: negative random_state_bytes or flops")
        _check_alternatives(graph, op, where)
        for alternative in op.alternatives:
            for value in alternative.writes:
                if producers.setdefault(value, position) != position:
                    raise InvalidGraph(
                        f"value {value} is written by two ops, {producers[value]} and {position}"
                    )
    return producers


def _check_alternatives(graph: Graph, op: Op, where: str) -> None:
    if not op.alternatives:
        raise InvalidGraph(f"{where} has no alternative")
    if op.alternatives[0].use == "again":
        raise InvalidGraph(f"{where}: the first alternative must serve the first computation")
    for alternative in op.alternatives:
        label = f"{where}, alternative {alternative.name!r}"
        _check_ids(graph, alternative.reads, label)
        _check_ids(graph, alternative.writes, label)
        if len(set(alternative.writes)) != len(alternative.writes):
            raise InvalidGraph(f"{label} writes a value twice")
        _check_overwrite(graph, alternative, label)
        if alternative.flops is not None and alternative.flops < 0:
            raise InvalidGraph(f"{label}: negative flops")
        if not alternative.variants:
            raise InvalidGraph(f"{label} has no variant")
        for variant in alternative.variants:
            if not 0 <= variant.workspace_bytes <= _LARGEST_BYTES:
                raise InvalidGraph(f"{label}: workspace_bytes is out of range")
            if not (math.isfinite(variant.cost_s) and variant.cost_s >= 0):
                raise InvalidGraph(f"{label}: cost_s must be a finite number of at least 0")


def _check_ids(graph: Graph, ids: Iterable[int], label: str) -> None:
    for value in ids:
        if not 0 <= value < len(graph.values):
            raise InvalidGraph(f"{label}: value {value} does not exist")


def _check_overwrite(graph: Graph, alternative: Alternative, label: str) -> None:
    target = alternative.overwrites
    if target is None:
        return
    if target not in alternative.reads or not alternative.writes:
        raise InvalidGraph(f"{label} overwrites value {target} without reading it or writing any")
    written = graph.values[alternative.writes[0]]
    if graph.values[target].is_constant or graph.values[target].fate != "none":
        raise InvalidGraph(f"{label} overwrites value {target}, which somebody keeps")
    if graph.values[target].size_bytes != written.size_bytes:
        raise InvalidGraph(f"{label} overwrites value {target} of another size")


def _check_producers(graph: Graph, producers: dict[int, int]) -> None:
    for value in graph.values:
        given = value.is_constant or value.role == "tangent"
        if given and value.id in producers:
            raise InvalidGraph(
                f"value {value.id} ({value.name!r}) is a {value.role} and cannot be written by "
                f"op {producers[value.id]}"
            )
        if not given and value.id not in producers:
            raise InvalidGraph(f"value {value.id} ({value.name!r}) is written by no op")
    for op in graph.ops:
        for alternative in op.alternatives:
            for value in alternative.reads:
                source = graph.values[value]
                if source.is_constant:
                    continue
                if source.role == "tangent":
                    if source.segment is not None and source.segment > op.segment:
                        raise InvalidGraph(f"op {op.id} reads tangent {value} before it appears")
                    continue
                own = producers[value] == op.id and alternative.use == "again"
                if producers[value] >= op.id and not own:
                    raise InvalidGraph(
                        f"op {op.id} ({op.target!r}) reads value {value} ({source.name!r}) of "
                        f"op {producers[value]}: the ops form a cycle or are out of order"
                    )


def _check_changes(graph: Graph) -> None:
    """Check that a value changed by an op is a constant whose old content no later op needs."""
    changed: dict[int, int] = {}
    for op in graph.ops:
        where = f"op {op.id} ({op.target!r})"
        for value in op.changes:
            if not 0 <= value < len(graph.values) or not graph.values[value].is_constant:
                raise InvalidGraph(f"{where} changes value {value}, which is no constant")
            if value in changed:
                raise InvalidGraph(f"{where} changes value {value}, as op {changed[value]} does")
            changed[value] = op.id
        if op.changes and (op.pinned is None or not op.required):
            raise InvalidGraph(f"{where} changes a constant, so it runs once: pinned and required")
    for number, before in need_before_changes(graph).items():
        late = max(before, default=-1)
        if late > number:
            raise InvalidGraph(
                f"op {number} ({graph.ops[number].target!r}) changes values "
                f"{graph.ops[number].changes}, whose old content op {late} "
                f"({graph.ops[late].target!r}) needs"
            )


def _check_choices(graph: Graph) -> None:
    for number, choice in enumerate(graph.choices):
        if not choice.branches:
            raise InvalidGraph(f"choice {number} has no branch")
        for branch in choice.branches:
            for op, alternative in branch:
                if not 0 <= op < len(graph.ops):
                    raise InvalidGraph(f"choice {number}: op {op} does not exist")
                if not 0 <= alternative < len(graph.ops[op].alternatives):
                    raise InvalidGraph(f"choice {number}: op {op} has no alternative {alternative}")


def _check_constants(graph: Graph) -> None:
    for kind, size in graph.constants_bytes.items():
        if not 0 <= size <= _LARGEST_BYTES:
            raise InvalidGraph(f"constants_bytes[{kind!r}] = {size} is out of range")
    for role, kind in CONSTANT_ROLES.items():
        declared = graph.constants_bytes.get(kind, 0)
        listed = sum(v.size_bytes for v in graph.values if v.role == role)
        if listed > declared:
            raise InvalidGraph(
                f"the {role} values take {listed} bytes but constants_bytes[{kind!r}] counts "
                f"only {declared}"
            )
