"""Which ops a plan of the engine may compute again, and how."""

from __future__ import annotations

from tightfit.graph.ir import Alternative, Graph, Op, ValueId

__all__ = ["has_plain_twin", "ways_again"]


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

    Left out: pinned ops; alternatives that serve the first computation only, make a
    finished gradient or a written-back value twice, read a constant that is replaced during the
    step, cannot avoid to overwrite what they read, or read what is overwritten and cannot be
    computed again itself. An optional op may run for the first time late, in its own segment
    only, so its alternatives have to serve first and later computations.
    """
    replaced = {v.replaces for v in graph.values if v.fate == "written_back"}
    once = {v.id for v in graph.values if v.fate in ("handed_over", "written_back")}
    lost = _lost_values(graph)
    return tuple(
        ()
        if op.pinned is not None
        else tuple(
            number
            for number, way in enumerate(op.alternatives)
            if (way.use != "first" if op.required else way.use == "any")
            and (way.overwrites is None or has_plain_twin(op, way))
            and once.isdisjoint(way.writes)
            and replaced.isdisjoint(way.reads)
            and lost.isdisjoint(way.reads)
        )
        for op in graph.ops
    )


def _lost_values(graph: Graph) -> set[ValueId]:
    """Values of pinned ops that some alternative cannot avoid to overwrite."""
    pinned = {
        v for op in graph.ops if op.pinned is not None for a in op.alternatives for v in a.writes
    }
    return {
        way.overwrites
        for op in graph.ops
        for way in op.alternatives
        if way.overwrites in pinned and not has_plain_twin(op, way)
    }
