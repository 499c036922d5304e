"""The blocks of a plan: every lifetime of every value, and the workspaces of ops."""

from __future__ import annotations

from tightfit.graph.ir import Graph
from tightfit.layout.blocks import Block
from tightfit.plan.lives import lives_of
from tightfit.plan.plan import Plan


def blocks_of_plan(graph: Graph, plan: Plan) -> tuple[Block, ...]:
    """Return the blocks of a valid plan: its lives, numbered in their order."""
    return tuple(
        Block(number, life.lower, life.upper, life.size_bytes)
        for number, life in enumerate(lives_of(graph, plan))
    )
