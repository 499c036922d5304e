"""A call whose outputs have other gradients than its plan has room for, planned anew in backward.

An output beside a loss is planned to receive no gradient. If code after the call takes it into a
loss all the same, what the plan keeps is let go of, and another plan runs forward and backward of
that call at once, within the same budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from tightfit.errors import PlanMismatch
from tightfit.execution.lower import Program
from tightfit.torch_private import core as private

__all__ = ["Planned", "gradients_at_once", "refuse_others", "tangent", "unplanned"]


class Planned(Protocol):
    """What runs a plan; `execution.runtime.Runner` is one."""

    program: Program
    tangents: list[tuple[int, torch.Tensor]]
    canonical: dict[int, int]

    def without_gradient(self, missing: frozenset[int]) -> frozenset[int]:
        """Return the placeholders that have no gradient where some outputs have none."""
        ...


def gradients_at_once(
    planned: Planned, inputs: Sequence[Any], came: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor | None]:
    """Run forward and backward of a call; return the gradients by positions of placeholders.

    Parameters
    ----------
    planned : Planned
        The plan that has room for them.
    inputs : sequence
        The placeholders.
    came : mapping of int to Tensor
        The gradients of outputs.

    Raises
    ------
    PlanMismatch
        If the plan takes other outputs.
    """
    ready = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    left = {planned.canonical.get(index, index): gradient for index, gradient in came.items()}
    if len(left) < len(came) or not left.keys() <= {index for index, _ in planned.tangents}:
        raise unplanned(max(came))
    missing = frozenset(index for index, _ in planned.tangents if index not in left)
    with private.without_autocast():
        _, saved = planned.program.forward(ready)
        tangents = [tangent(left.pop(index, None), meta) for index, meta in planned.tangents]
        groups = list(planned.program.backward(saved, tangents))
    positions = [position for group in planned.program.groups for position in group]
    found = dict(zip(positions, [g for group in groups for g in group], strict=True))
    nothing = planned.without_gradient(missing) if missing else frozenset[int]()
    return {position: None if position in nothing else g for position, g in found.items()}


def refuse_others(
    found: Mapping[int, Any], groups: Sequence[Sequence[int]], late: Sequence[int]
) -> None:
    """Refuse gradients of placeholders for which autograd expects none from a call.

    Parameters
    ----------
    found : mapping of int to Tensor or None
        The gradients.
    groups : sequence of sequence of int
        The placeholders that had gradients by the plan the call was run with.
    late : sequence of int
        The outputs that were to have no gradient.
    """
    expected = {position for group in groups for position in group}
    if any(g is not None for position, g in found.items() if position not in expected):
        raise unplanned(late[0], "parameters have gradients that were to have none")


def tangent(gradient: torch.Tensor | None, meta: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an output; zeros where there is none.

    It may have any strides (an expanded scalar, say): the same kernels then run as in eager.
    """
    if gradient is not None:
        return gradient
    return torch.empty_strided(
        meta.shape, meta.stride(), dtype=meta.dtype, device=meta.device
    ).zero_()


def unplanned(output: int, why: str = "") -> PlanMismatch:
    """Return the error that an output has a gradient for which a plan has no room."""
    reason = f" It cannot be run with another plan now, as {why}." if why else ""
    return PlanMismatch(
        f"output {output} received a gradient, though it received none in the first step and the "
        f"plan has no room for it.{reason} The plan is dropped; run the step again and a plan with "
        "this gradient is made"
    )
