"""Which ops a plan of the engine may compute again, and how."""

from __future__ import annotations

from tightfit.graph.ir import Alternative, Graph, Op, ValueId


def has_plain_twin(op: Op, alternative: Alternative) -> bool:
    """Whether another alternative differs only in that it overwrites nothing."""
    return any(
        other.overwrites is None
        and other.use == alternative.use
        and set(other.reads) == set(alternative.reads)
        and other.writes == alternative.writes
        for other in op.alternatives
    )


def ways_again(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return, per op, the alternatives by which a plan of the engine may compute it again.

    Left out are pinned ops, and alternatives that serve the first computation only or would make a
    finished gradient or a written-back value twice. So are alternatives that read a constant which
    is replaced during the step, and alternatives that must overwrite an input. So are readers of a
    value that is overwritten and cannot be computed again. An optional op may run for the first
    time late, in its own segment only, so its alternatives have to serve first and later
    computations.
    """
    replaced = {v.replaces for v in graph.values if v.fate == "written_back"}
    once = {v.id for v in graph.values if v.fate in ("handed_over", "written_back")}
    overwritten = _overwritten_values(graph)
    lost: set[ValueId] = set()  # a value is read by later ops only
    found: list[tuple[int, ...]] = []
    for op in graph.ops:
        ways = tuple(
            number
            for number, way in enumerate(op.alternatives)
            if op.pinned is None
            and (way.use != "first" if op.required else way.use == "any")
            and (way.overwrites is None or has_plain_twin(op, way))
            and once.isdisjoint(way.writes)
            and replaced.isdisjoint(way.reads)
            and lost.isdisjoint(way.reads)
        )
        found.append(ways)
        again = {value for number in ways for value in op.alternatives[number].writes}
        lost |= {v for way in op.alternatives for v in way.writes} & overwritten - again
    return tuple(found)


def _overwritten_values(graph: Graph) -> set[ValueId]:
    """Values that some alternative cannot avoid to overwrite."""
    return {
        way.overwrites
        for op in graph.ops
        for way in op.alternatives
        if way.overwrites is not None and not has_plain_twin(op, way)
    }
