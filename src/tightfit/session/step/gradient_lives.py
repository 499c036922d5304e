"""How long gradients live once a plan has handed them over.

Most loops keep them until the optimizer steps. But a penalty on the weights has gradients, too,
which wait for those of the step. Autograd adds each of these to what waits, so that it takes no
memory of its own once it is handed over.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.execution.guard import StepPeaks
from tightfit.graph.ir import Graph


@dataclass(frozen=True)
class GradientLives:
    """Bytes of gradients that others are added to, and of new ones that exist afterwards."""

    waiting_bytes: int  # of code outside: they exist when the backward of the step begins
    lasting_bytes: int


def gradient_lives(graph: Graph, existing_bytes: int, step: StepPeaks) -> GradientLives | None:
    """Return what became of the gradients of a step; None: for most of them none waited.

    `existing_bytes`: of gradients that existed before it, to which its own were added.
    """
    if not step.ended_bytes:
        return None
    handed_bytes = graph.handed_over_bytes
    staying_bytes = staying_bytes_of(graph, step)
    new_bytes = max(0, handed_bytes - existing_bytes)
    # they held these, and hold the sums: less is there than both would take
    waiting_bytes = min(staying_bytes, staying_bytes + new_bytes - step.ended_bytes)
    if 2 * waiting_bytes < max(handed_bytes, 1) or 2 * step.ended_bytes < new_bytes:
        return None
    return GradientLives(waiting_bytes, min(new_bytes, step.ended_bytes))


def staying_bytes_of(graph: Graph, step: StepPeaks) -> int:
    """Return the bytes of user code that exist from the begin of the backward to its end.

    Less than 0 if memory of the start of the step was freed before.
    """
    return step.entered_bytes + step.freed_bytes - step.boundary_bytes - graph.tangent_bytes
