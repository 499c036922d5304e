"""Schedules far from any planner's: values dropped and computed again at random."""

from __future__ import annotations

import random

from tightfit.graph.ir import Graph
from tightfit.plan.plan import Compute


def recompute_at_random(
    graph: Graph, generator: random.Random, share: float = 0.3
) -> list[Compute]:
    """Drop values at random and compute them again, with any alternative, when they are read."""
    producer: dict[int, int] = {}
    for op in graph.ops:
        for alternative in op.alternatives:
            for value in alternative.writes:
                producer.setdefault(value, op.id)
    live: set[int] = set()
    done: set[int] = set()
    computes: list[Compute] = []

    def droppable(value: int) -> bool:
        op = graph.ops[producer[value]]
        again = [a for a in op.alternatives if a.use in ("any", "again")]
        return (
            op.pinned is None
            and graph.values[value].fate == "none"
            and all(value in a.writes for a in again)
        )

    def need(value: int) -> None:
        if value in producer and value not in live:
            compute(producer[value])

    def compute(number: int) -> None:
        op = graph.ops[number]
        use = ("any", "again") if number in done else ("any", "first")
        choices = [i for i, a in enumerate(op.alternatives) if a.use in use]
        harmless = [
            i
            for i in choices
            if op.alternatives[i].overwrites is None or droppable(op.alternatives[i].overwrites)
        ]
        index = generator.choice(harmless or choices)
        alternative = op.alternatives[index]
        if number in done and alternative.overwrites is not None and live & {*alternative.writes}:
            alternative = op.alternatives[index := 0]
        while missing := [v for v in alternative.reads if v in producer and v not in live]:
            need(missing[0])
        computes.append(Compute(number, index))
        done.add(number)
        live.discard(alternative.overwrites)
        live.update(alternative.writes)

    for op in graph.ops:
        compute(op.id)
        if op.segment == 1 or generator.random() < 0.2:
            for value in sorted(live):
                if generator.random() < share and droppable(value):
                    live.discard(value)
    return computes
