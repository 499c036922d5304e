"""The planned call that has made a tensor or a node of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tightfit.torch_private import engine


class Chained:
    """A call whose outputs leave a chain of nodes of autograd's, each of which has it as `run`."""


def made_by(tensor: Any) -> tuple[Any, int] | None:
    """Return which call has made a tensor, and as which output of its chain; None: none has."""
    node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
    run = _run_of(node)
    return None if run is None or node.index > 0 else (run, tensor.output_nr)


def gradient_edges(node: Any, groups: Sequence[Sequence[int]]) -> dict[int, tuple[Any, int]]:
    """Return where in autograd's graph the gradients of a call go, by their placeholders.

    `node`: the first node of the call's chain. `groups`: the placeholders whose gradients each node
    of the chain hands over.
    """
    found: dict[int, tuple[Any, int]] = {}
    for positions in groups:
        following, *edges = node.next_functions
        found.update(zip(positions, edges, strict=False))  # of others behind them
        node = following[0]
    return found


def goes_on_through(node: Any, run: Chained) -> bool:
    """Whether the backward that runs now goes on behind a call's chain of nodes."""
    while _run_of(node) is run:
        following, *edges = node.next_functions
        if any(before is not None and engine.asks_for_gradient(before) for before, _ in edges):
            return True
        node = following[0]
    return False


def _run_of(node: Any) -> Chained | None:
    """Return the call whose chain a node belongs to; None if it belongs to none."""
    run = getattr(node, "run", None)
    return run if isinstance(run, Chained) else None
