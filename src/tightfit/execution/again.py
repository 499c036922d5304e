"""A call run again, plainly, for a backward that is to be differentiated itself.

A plan computes gradients without a history: with ``create_graph=True`` they would come out as
constants. Such a backward lets go of what the plan keeps, runs the forward once more under autograd
and differentiates that. From then on the call is held as plain PyTorch holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tightfit.capture.joint_graph import JointGraph
from tightfit.errors import WITHOUT_A_PLAN, TightfitError
from tightfit.execution.returned import raw_outputs
from tightfit.torch_private import engine

__all__ = ["Again", "Plainly"]

Plainly = Callable[[], tuple[Sequence[Any], Sequence[Any]]]
"""Runs a call again under autograd: its flattened outputs, and its placeholders."""


class Again:
    """A call whose gradients are differentiated.

    Every backward that is differentiated goes through one forward that was run again: what is
    derived of their gradients meets there, in the order of plain PyTorch.

    Parameters
    ----------
    joint : JointGraph
        What was planned of it.
    plainly : callable
        Runs it again.
    """

    def __init__(self, joint: JointGraph, plainly: Plainly) -> None:
        self._joint = joint
        outputs, self._inputs = plainly()
        self._outputs = {i: x for i, x in raw_outputs(joint, outputs).items() if x.requires_grad}

    def gradients(
        self, by_position: Mapping[int, torch.Tensor | None], canonical: Mapping[int, int]
    ) -> dict[int, torch.Tensor | None]:
        """Return the gradients that a backward asks for, by positions of placeholders.

        Parameters
        ----------
        by_position : mapping of int to Tensor or None
            Gradients of raw outputs.
        canonical : mapping of int to int
            Which of the raw outputs stands for others that are the same.
        """
        came = {
            output: gradient
            for base, output in self._outputs.items()
            if (gradient := by_position.get(canonical.get(base, base))) is not None
        }
        wanted = [p for _, p in self._joint.gradients if engine.asks_for_gradient(self._inputs[p])]
        if not wanted or not came:
            return {}
        if not torch.is_grad_enabled() and self._meets_its_derivative():
            if any(bool(gradient.any()) for gradient in came.values()):
                raise _used_with()
            return {position: torch.zeros_like(self._inputs[position]) for position in wanted}
        found = torch.autograd.grad(
            list(came),
            [self._inputs[position] for position in wanted],
            list(came.values()),
            create_graph=torch.is_grad_enabled(),
            retain_graph=True,
            allow_unused=True,
        )
        return dict(zip(wanted, found, strict=True))

    def _meets_its_derivative(self) -> bool:
        """Whether the backward that runs now goes through the forward that was run again."""
        owners = [x for x in self._inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        seen = {engine.gradient_node(x) for x in owners}
        waiting = [engine.gradient_node(output) for output in self._outputs.values()]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if engine.runs_in_this_backward(node):
                return True
            waiting.extend(before for before, _ in node.next_functions if before is not None)
        return False


def _used_with() -> TightfitError:
    return TightfitError(
        "a loss goes back through an output of a tightfit step together with its derivative "
        "(create_graph=True): both meet inside of the step, where plain PyTorch adds in another "
        "order, and gradients would differ in their last bits. Take the derivative inside of what "
        "is planned (tightfit.step), or call the model once more for what else takes its output. "
        f"{WITHOUT_A_PLAN}"
    )
