"""A call that is run again in its backward, by another plan or once more by its own.

An output returned along with a loss is planned to receive no gradient. If code after the call takes
it into a loss all the same, the tensors that the plan has saved are freed. Another plan runs
forward and backward of that call at once, within the same budget. A backward that comes after
another finds nothing kept: the plan's forward runs again, and its backward in step with
autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol, TypeAlias

import torch

from tightfit.errors import PlanMismatch
from tightfit.execution.lower import Program
from tightfit.execution.returned import Returned
from tightfit.torch_private import core as private
from tightfit.torch_private import traces

BeginSum: TypeAlias = Callable[[int, torch.Tensor], torch.Tensor]


class Planned(Protocol):
    """A program of a plan, such as `execution.runtime.Runner`."""

    program: Program
    tangents: list[tuple[int, torch.Tensor]]
    returned: Returned

    def without_gradient(self, missing: frozenset[int]) -> frozenset[int]:
        """Return the placeholders that have no gradient where some outputs have none."""


def gradients_at_once(
    planned: Planned, inputs: Sequence[Any], grad_outputs: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor | None]:
    """Run forward and backward of a call; return the gradients by positions of placeholders."""
    groups = gradients_in_turn(planned, inputs, grad_outputs, lambda _, term: term)
    return {position: gradient for group in groups for position, gradient in group.items()}


def gradients_in_turn(
    planned: Planned,
    inputs: Sequence[Any],
    grad_outputs: Mapping[int, torch.Tensor],
    begin_sum: BeginSum,
) -> Iterator[dict[int, torch.Tensor | None]]:
    """Run the forward of a call; return an iterator that runs its backward by groups of gradients.

    `begin_sum`: returns the first term of the sum of a gradient, as of `Program`. Raises
    `PlanMismatch` if the plan takes gradients of other outputs.
    """
    ready = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    same = planned.returned.canonical
    left = {same.get(index, index): gradient for index, gradient in grad_outputs.items()}
    if len(left) < len(grad_outputs) or not left.keys() <= {index for index, _ in planned.tangents}:
        raise unplanned(max(grad_outputs))
    missing = frozenset(index for index, _ in planned.tangents if index not in left)
    with private.without_autocast():
        _, saved = planned.program.forward(ready)
    tangents = [tangent(left.pop(index, None), meta) for index, meta in planned.tangents]
    nothing = planned.without_gradient(missing) if missing else frozenset[int]()
    sums = (begin_sum,) if planned.program.sums else ()
    coming = planned.program.backward(saved, tangents, *sums)
    return _by_position(planned.program, coming, nothing)


def _by_position(
    program: Program, backward: Iterator[list[Any]], nothing: Set[int]
) -> Iterator[dict[int, torch.Tensor | None]]:
    for positions in program.groups:
        with private.without_autocast():
            gradients = next(backward)
        yield _taken(gradients, positions, nothing)


def _taken(
    gradients: list[Any], positions: Sequence[int], nothing: Set[int]
) -> dict[int, torch.Tensor | None]:
    """Take gradients out of their list: autograd copies a gradient that something else holds,
    too."""
    found = {p: None if p in nothing else g for p, g in zip(positions, gradients, strict=True)}
    gradients.clear()
    return found


def grouped(
    coming: Iterator[dict[int, torch.Tensor | None]], groups: Sequence[Sequence[int]]
) -> Iterator[list[torch.Tensor | None]]:
    """Yield gradients in the groups in which autograd expects them; hold early ones."""
    waiting: dict[int, torch.Tensor | None] = {}
    for positions in groups or ((),):
        while not waiting.keys() >= set(positions):
            waiting |= next(coming)
        yield [waiting.pop(position) for position in positions]


def refuse_others(
    found: Mapping[int, Any], groups: Sequence[Sequence[int]], late: Sequence[int]
) -> None:
    """Refuse gradients of placeholders for which autograd expects none from a call.

    `groups`: the placeholders that had gradients by the plan the call was run with. `late`: the
    outputs that were to have no gradient.
    """
    expected = {position for group in groups for position in group}
    if any(g is not None for position, g in found.items() if position not in expected):
        raise unplanned(
            min(late, default=0), "parameters or inputs have gradients that were to have none"
        )


def tangent(gradient: torch.Tensor | None, meta: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an output; zeros where there is none.

    It may have any strides (an expanded scalar, say), but for plans that fix them: the same kernels
    then run as in eager. Conjugation and negation are put off where the traced gradient puts them
    off, and only there.
    """
    if gradient is None:
        sizes = meta.shape, meta.stride()
        gradient = torch.empty_strided(*sizes, dtype=meta.dtype, device=meta.device).zero_()
    if gradient.is_neg() != meta.is_neg():
        is_put_off = meta.is_neg()
        gradient = traces.negative_view(-gradient) if is_put_off else gradient.resolve_neg()
    if gradient.is_conj() != meta.is_conj():
        is_put_off = meta.is_conj()
        gradient = gradient.conj_physical().conj() if is_put_off else gradient.resolve_conj()
    return gradient


def has_other_strides(gradient: torch.Tensor | None, meta: torch.Tensor) -> bool:
    """Whether the gradient of an output has other strides than were traced.

    An expanded number has none: what is computed of it and a tensor takes the strides of that.
    """
    if gradient is None or gradient.layout is not torch.strided:
        return False
    least = 1 if meta.dim() in _DIMENSIONS_OF_FORMATS else 2
    sizes = zip(meta.shape, gradient.stride(), meta.stride(), strict=True)
    pairs = [(own, traced) for n, own, traced in sizes if n >= least]
    return any(own for own, _ in pairs) and any(own != traced for own, traced in pairs)


_DIMENSIONS_OF_FORMATS = (4, 5)
"""Of tensors with a memory format, which kernels read from strides, those of one element too."""


def laid_out(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor with the strides that a program takes."""
    if tensor.stride() == tuple(strides):
        return tensor
    kind = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.empty_strided(shape, strides, **kind).copy_(tensor)


def unplanned(output: int, why: str = "") -> PlanMismatch:
    """Return the error that an output has a gradient for which a plan has no room."""
    reason = f" It cannot be run with another plan now, as {why}." if why else ""
    return PlanMismatch(
        f"output {output} received a gradient, though it received none in the first step and the "
        f"plan has no room for it.{reason} The plan is dropped. Run the step again and a plan with "
        "this gradient is made"
    )
