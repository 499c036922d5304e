"""Values a step reads in Python, and the check that they still hold at a later call.

Values that follow from inputs and buffers alone are recorded while the step is traced, and run on
the real ones: the trace goes on with the true number. Every later call computes it again and uses
this graph only if it is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tightfit.capture.decisions.shared import SharedViews, view_alike
from tightfit.torch_private import core as private


@dataclass(frozen=True)
class TapeSlot:
    """The placeholder of a tensor among the arguments of a recorded operator."""

    number: int


@dataclass(frozen=True)
class TapeStep:
    """One operator that ran while the step was traced; tensors among its arguments are slots."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]

    def slots(self) -> Iterator[int]:
        for leaf in private.pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, TapeSlot):
                yield leaf.number

    def result(self, tensors: Mapping[int, torch.Tensor]) -> Any:
        """Run the operator on the tensors of its slots."""
        args, kwargs = private.pytree.tree_map(
            lambda x: tensors[x.number] if isinstance(x, TapeSlot) else x, (self.args, self.kwargs)
        )
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Read:
    """A step whose result tells Python a number, with that number."""

    step: TapeStep
    value: Any

    def holds(self, tensors: Mapping[int, torch.Tensor]) -> bool:
        """Whether it tells the same number of other tensors."""
        now, before = self.step.result(tensors), self.value
        same_kind = type(now) is type(before)
        return same_kind and bool(now == before or (now != now and before != before))


@dataclass(frozen=True)
class Decisions:
    """The values that a traced step read in Python, and how to compute them again."""

    # Operators on inputs and buffers, and the values read from them, in order
    steps: tuple[TapeStep | Read, ...] = ()
    # The slots that are inputs (their position) or buffers (their qualified name)
    leaves: Mapping[int, int | str] = field(default_factory=dict)
    copied: frozenset[int] = frozenset()  # leaves that a step writes to: each check works on a copy
    # Inputs that are views of one tensor which the step writes
    shared: tuple[SharedViews, ...] = ()

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(step.value for step in self.steps if isinstance(step, Read))

    def hold(self, inputs: Sequence[Any], modules: Mapping[str, nn.Module]) -> bool:
        """Whether the same values would be read with other inputs."""
        if self.shared and not all(view_alike(inputs, each) for each in self.shared):
            return False
        if not self.steps:
            return True
        tensors: dict[int, torch.Tensor] = {}
        for slot, place in self.leaves.items():
            if isinstance(place, int):
                tensor = inputs[place]
            else:
                prefix, _, name = place.partition(".")
                tensor = modules[prefix].get_buffer(name)
            tensors[slot] = owned(tensor, copied=slot in self.copied)
        with torch.no_grad(), private.without_autocast():
            for step in self.steps:
                if isinstance(step, TapeStep):
                    run_step(step, tensors)
                elif not step.holds(tensors):
                    return False
        return True


def owned(tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """Return a leaf to run steps on: itself, or a copy if a step writes to it."""
    return tensor.detach().clone() if copied else tensor.detach()


def run_step(step: TapeStep, tensors: dict[int, torch.Tensor]) -> None:
    """Run a step on the tensors known so far; add its results to them."""
    outputs = private.pytree.tree_leaves(step.result(tensors))
    for slot, output in zip(step.outputs, outputs, strict=True):
        if slot is not None:
            tensors[slot] = output


def itself(slot: int) -> TapeStep:
    """Return a step whose result is the tensor of a slot."""
    return TapeStep(torch.ops.aten.alias.default, (TapeSlot(slot),), {}, ())
