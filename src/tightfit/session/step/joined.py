"""Gradients of a step that are added to gradients which code outside computed before.

A penalty on the weights has gradients, too. They wait for those of the step: autograd adds each of
these to what waits, so that it takes no memory of its own once it is handed over.
"""

from __future__ import annotations

from tightfit.execution.guard import StepPeaks
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients


def joined_bytes(graph: Graph, gradients: Gradients, step: StepPeaks) -> int:
    """Return the bytes, at least, that waited for gradients of a step as its backward began.

    They were there then, and hold the sums afterwards. 0 if it is less than half of its gradients.

    `gradients`: as the step was planned with.
    """
    if not step.ended_bytes:
        return 0
    handed_bytes = sum(v.size_bytes for v in graph.values if v.fate == "handed_over")
    staying_bytes = staying_bytes_of(graph, step)
    outlive_bytes = handed_bytes if gradients == "fresh" else 0
    joined = min(staying_bytes, staying_bytes + outlive_bytes - step.ended_bytes)
    return joined if 2 * joined >= max(handed_bytes, 1) else 0


def staying_bytes_of(graph: Graph, step: StepPeaks) -> int:
    """Return the bytes of user code that exist from the begin of the backward to its end.

    Less than 0 if memory of the start of the step was freed before.
    """
    tangents = sum(v.size_bytes for v in graph.values if v.role == "tangent")
    return step.entered_bytes + step.freed_bytes - step.boundary_bytes - tangents
