"""The outermost frame that Dynamo follows: it notes values returned along with a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.comptime import comptime
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._dynamo.variables.tensor import TensorVariable


def with_own_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function around another, whose code is its own: Dynamo keeps graphs by code.

    While Dynamo follows it, it notes values that the other returns along with a loss.
    """

    def inner(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        if isinstance(output, torch.Tensor) or type(output) in _WITHOUT_NAMES:
            return output
        if isinstance(output, frozenset):  # Dynamo makes one only where one is named
            return output
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
            comptime(_note_returned_with_loss)
        return output

    inner.__code__ = inner.__code__.replace(co_name=inner.__code__.co_name)
    return inner


_WITHOUT_NAMES = (tuple, list, set, int, float, bool, str, type(None))


def _note_returned_with_loss(context: Any) -> None:
    """Note which tensors are returned along with a loss, and kept nowhere else."""
    local = {
        name: context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
        for name in ("loss", "output")
    }
    effects = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.side_effects
    kept = _made_in([local["loss"], *changed_variables(effects)], effects)
    for node in _made_in(local["output"], effects) - kept:
        node.meta[_RETURNED_WITH_LOSS] = True


def changed_variables(effects: Any) -> list[VariableTracker]:
    """Return objects that existed before Dynamo followed a frame, and that its Python changes."""
    existing = AttributeMutationExisting | ValueMutationExisting
    return [
        each
        for each in effects.id_to_variable.values()
        if isinstance(each.mutation_type, existing) and effects.is_modified(each)
    ]


def _made_in(variables: Any, effects: Any) -> set[fx.Node]:
    """Return the nodes of the tensors in Dynamo's record of values."""
    found: set[fx.Node] = set()

    def note(variable: VariableTracker) -> None:
        if isinstance(variable, TensorVariable):
            found.add(variable.as_proxy().node)

    VariableTracker.visit(note, variables, side_effects=effects)
    return found


_RETURNED_WITH_LOSS = "tightfit_beside_loss"


def is_returned_with_loss(node: fx.Node) -> bool:
    """Whether the callable returns a node's value along with its loss, and keeps it nowhere."""
    return _RETURNED_WITH_LOSS in node.meta
