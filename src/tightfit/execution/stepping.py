"""Backwards that a plan with the optimizer's step inside cannot serve: refused before they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from tightfit.capture.captured import Captured
from tightfit.errors import TightfitError
from tightfit.execution.run_state import RunState
from tightfit.torch_private import engine

_OTHERWISE = "Way out: fit the model without update_in_backward. Nothing has been changed"


class Steps(Protocol):
    """Runs a plan with steps of parameters, as `execution.runtime.Runner` does."""

    captured: Captured
    differentiable: frozenset[int]
    stepped: tuple[int, ...]

    def without_gradient(self, missing: frozenset[int]) -> frozenset[int]:
        """Return the placeholders that have no gradient where some outputs have none."""


def refuse_other_backward(
    runner: Steps, grad_outputs: Mapping[int, torch.Tensor | None], node: Any, *, state: RunState
) -> None:
    """Raise if a backward that steps parameters is to do something else than one whole step.

    `node`: the first of its chain in autograd's graph. Raises `TightfitError`: names the cause, and
    a way out.
    """
    missing = frozenset(i for i in runner.differentiable if grad_outputs.get(i) is None)
    without = runner.without_gradient(missing).intersection(runner.stepped) if missing else ()
    why = None
    if state is not RunState.AWAITS_BACKWARD:
        why = "a second backward through a call whose first backward has stepped its parameters"
    elif torch.is_grad_enabled():
        why = "a backward that is differentiated itself (create_graph=True)"
    elif not _reaches_all(node.next_functions[-len(runner.stepped) :]):
        why = "a backward for some gradients only (torch.autograd.grad, or inputs=)"
    elif without:
        name = runner.captured.joint.sources[min(without)].name
        why = f"a backward in which {name} has no gradient, as the loss takes too few outputs"
    if why is not None:
        raise TightfitError(
            f"{runner.captured.graph.name} is fitted with update_in_backward=True, and this is "
            f"{why}: plain PyTorch would step differently. {_OTHERWISE}"
        )
    runner.captured.stepper.before_backward()


@contextlib.contextmanager
def with_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> Iterator[None]:
    parameter.grad = gradient
    try:
        yield
    finally:
        parameter.grad = None


def _reaches_all(edges: Sequence[tuple[Any, int]]) -> bool:
    """Whether the backward that runs now accumulates the gradient of each of some parameters."""
    try:
        return all(engine.runs_in_this_backward(node) for node, _ in edges)
    except RuntimeError:  # of a leaf for which torch.autograd.grad was called
        return False
