"""Gradients that are sums, added up in the order of plain PyTorch where several calls meet.

Autograd adds up what comes for a parameter in one backward term by term, whichever call a term is
of. A plan hands over the sum of its own terms. So where the sum of one call is on its way already,
the plan of the next one goes on with it: it adds its terms to that one, in place, and hands over
nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from tightfit.capture.captured import Captured
from tightfit.capture.nodes import terms_of
from tightfit.graph.ir import OpId
from tightfit.plan.plan import Compute, Plan
from tightfit.torch_private import engine

__all__ = ["FirstSum", "Sums", "first_sums", "is_sum"]

aten = torch.ops.aten

_Edge: TypeAlias = tuple[Any, int]


@dataclass(frozen=True)
class FirstSum:
    """The sum of the first two terms of a gradient.

    Parameters
    ----------
    position : int
        The placeholder whose gradient it is.
    term : fx.Node
        The first of them.
    """

    position: int
    term: fx.Node


def is_sum(node: Any) -> bool:
    """Whether a node adds two tensors."""
    return isinstance(node, fx.Node) and node.target in (aten.add.Tensor, aten.add_.Tensor)


def first_sums(captured: Captured, plan: Plan) -> dict[OpId, FirstSum]:
    """Return the ops of a plan that add the first two terms of a gradient.

    Only those are among them that the plan runs once, and whose results nothing but the rest of
    the sum reads.
    """
    computes = [step for step in plan.instructions if isinstance(step, Compute)]
    times = Counter(step.op for step in computes)
    alternative = {step.op: step.alternative for step in computes if times[step.op] == 1}
    op_of = {node: op for op, node in enumerate(captured.nodes)}
    found = {}
    for gradient, position in captured.joint.gradients:
        node = _first_sum(gradient)
        op = op_of.get(node) if node is not None else None
        if node is None or op is None or op not in alternative:
            continue
        term = node.args[0]
        if sum(each is term for each in captured.calls[op][alternative[op]].args) == 1:
            found[op] = FirstSum(position, term)  # type: ignore[arg-type]
    return found


def _first_sum(gradient: fx.Node) -> fx.Node | None:
    """Return what adds the first two terms; None where something else happens to them."""
    node, first = gradient, None
    for _ in range(terms_of(gradient) - 1):
        if not is_sum(node) or node.kwargs or len(node.users) != 1:
            break
        first, node = node, node.args[0]  # type: ignore[assignment]
    return first


class _OnTheirWay(threading.local):
    """Sums that this thread handed over in the backward that it runs now."""

    def __init__(self) -> None:
        self._backward = -1
        self._sums: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}

    def note(self, edge: _Edge, gradient: torch.Tensor) -> None:
        """Note a sum that is handed over now."""
        self._look()
        node, place = edge
        self._sums[id(node), place] = weakref.ref(gradient)

    def at(self, edge: _Edge) -> torch.Tensor | None:
        """Return the sum that is on its way to the same place; None if autograd has none."""
        self._look()
        node, place = edge
        handed = self._sums.get((id(node), place))
        return handed() if handed is not None else None

    def _look(self) -> None:
        running = engine.running_backward()
        if running != self._backward:
            self._backward = running
            self._sums.clear()


_ON_THEIR_WAY = _OnTheirWay()


class Sums:
    """The gradients of one call that are sums.

    Parameters
    ----------
    announce : callable
        Told of a placeholder to whose sum code outside the plan has added, in another order than
        plain PyTorch.
    """

    def __init__(self, announce: Callable[[int], None]) -> None:
        self._announce = announce
        self._edges: dict[int, _Edge] = {}
        self._begun: dict[int, torch.Tensor] = {}
        self._handed: dict[int, int] = {}

    def watch(self, position: int, owner: torch.Tensor) -> None:
        """Say it if a gradient that is a sum is added to one that came from outside the plan.

        Plain PyTorch adds one term after the other, so the result may differ in its last bit. A
        gradient that came later was added into ours, as plain PyTorch does.
        """
        self._edges[position] = engine.gradient_edge(owner)
        waiting = weakref.ref(self)  # the parameter must not keep a call that is let go of

        def arrived(gradient: torch.Tensor) -> None:
            handle.remove()
            sums = waiting()
            own = sums._handed.pop(position, None) if sums is not None else None
            if sums is not None and own is not None and own != gradient.data_ptr():
                sums._announce(position)

        handle = owner.register_hook(arrived)
        weakref.finalize(self, handle.remove).atexit = False

    def begin(self, position: int, term: torch.Tensor) -> torch.Tensor:
        """Return what a sum begins with: its first term, added to what came of other calls."""
        edge = self._edges.get(position)
        before = _ON_THEIR_WAY.at(edge) if edge is not None else None
        if before is None:
            return term
        self._begun[position] = before
        return before.add_(term)

    def hand_over(self, positions: Sequence[int], gradients: list[torch.Tensor | None]) -> None:
        """Note the sums among gradients that are handed over; what autograd has already goes out.

        Parameters
        ----------
        positions : sequence of int
            The placeholders of the gradients.
        gradients : list of Tensor or None
            Those; None takes the place of one that was added to what is on its way.
        """
        for place, position in enumerate(positions):
            gradient, edge = gradients[place], self._edges.get(position)
            if edge is None or gradient is None:
                continue
            before = self._begun.pop(position, None)
            if before is None:
                _ON_THEIR_WAY.note(edge, gradient)
                self._handed[position] = gradient.data_ptr()
                continue
            if before.data_ptr() != gradient.data_ptr():
                before.copy_(gradient)
            gradients[place] = None
            self._handed[position] = before.data_ptr()

    def end(self) -> None:
        """Let go of all but what is said once gradients arrive."""
        self._edges.clear()
        self._begun.clear()
