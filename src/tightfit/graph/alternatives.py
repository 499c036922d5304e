"""The alternatives of an op in two graphs of one step."""

from __future__ import annotations

from tightfit.graph.ir import Graph, OpId


def number_among(before: Graph, after: Graph, op: OpId, alternative: int) -> int | None:
    """Return the number that an alternative of an op of one graph has in another; None: none.

    `before`, `after`: of the same ops, but for their alternatives.
    """
    name = before.ops[op].alternatives[alternative].name
    names = (alternative.name for alternative in after.ops[op].alternatives)
    return next((n for n, other in enumerate(names) if other == name), None)
