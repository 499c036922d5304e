"""Gradients of tensors that several calls read, added up in the order of plain PyTorch.

Autograd adds up gradients of a tensor in one backward term by term, whichever call a term is of.
A plan hands over the sum of its own terms. So where the gradient of one call is on its way already,
the plan of the next call goes on with it. It adds its terms to that gradient, in place, and hands
over nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import fx

from tightfit.capture.captured import Captured
from tightfit.capture.nodes import is_without_gaps, terms_of
from tightfit.capture.normalise.gradients import added_up
from tightfit.execution.chain import gradient_edges
from tightfit.graph.ir import OpId
from tightfit.plan.plan import Compute, Plan
from tightfit.torch_private import core as private
from tightfit.torch_private import engine

aten = torch.ops.aten

_Edge: TypeAlias = tuple[Any, int]


@dataclass(frozen=True)
class FirstSum:
    """The sum of the first two terms of a gradient."""

    position: int  # the placeholder whose gradient it is
    term: fx.Node  # the first of them


def outside_term_message(name: str, graph: str) -> str:
    """Return the message that code outside of a plan adds to a gradient that is a sum itself."""
    return (
        f"the gradient of {name} of {graph} is a sum, and code outside the plan adds to it: in "
        "another order than plain PyTorch, so that last bits may differ. Put that code into the "
        "plan, too (tightfit.step)"
    )


def views_message(graph: str) -> str:
    """Return the message that views of one another add to a gradient that is a sum in the plan."""
    return (
        f"outputs of {graph} are views of one tensor, which the plan itself reads. Gradients that "
        "code outside adds up come before those of the plan, in another order than plain PyTorch, "
        "so that last bits may differ. Put that code into the plan (tightfit.step)"
    )


def is_sum(node: Any) -> bool:
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
        node = _first_sum(added_up(gradient))
        op = op_of.get(node) if node is not None else None
        if node is None or op is None or op not in alternative:
            continue
        term = node.args[0]
        if sum(each is term for each in captured.calls[op][alternative[op]].args) == 1:
            found[op] = FirstSum(position, term)  # type: ignore[arg-type]
    return found


def added_to(tangent: fx.Node) -> torch.Tensor:
    """Return the tensor that a tangent is added to, else itself: zeros have that layout.

    Plain PyTorch adds nothing where an output has no gradient. A sum has the layout of both its
    terms, if these agree, and a gradient's layout decides in which order it is summed up.
    """
    own = tangent.meta["val"]
    for user in tangent.users:
        terms = user.args[:2] if is_sum(user) else ()
        for term in terms:
            rest = term.meta.get("val") if isinstance(term, fx.Node) else None
            if term is not tangent and isinstance(rest, torch.Tensor) and _is_like(rest, own):
                return rest
    return own


def _is_like(rest: torch.Tensor, own: torch.Tensor) -> bool:
    facts = ((x.shape, x.dtype, x.is_conj(), x.is_neg()) for x in (rest, own))
    return next(facts) == next(facts) and is_without_gaps(rest)


def _first_sum(gradient: fx.Node) -> fx.Node | None:
    """Return the op that adds the first two terms; None where something else happens to them."""
    node, first = gradient, None
    for _ in range(terms_of(gradient) - 1):
        if not is_sum(node) or node.kwargs or len(node.users) != 1:
            break
        first, node = node, node.args[0]  # type: ignore[assignment]
    return first


class _GradientsInFlight(threading.local):
    """Gradients that calls of this thread handed over in the backward that it runs now."""

    def __init__(self) -> None:
        self._backward = -1
        self._gradients: dict[_Edge, weakref.ref[torch.Tensor]] = {}

    def note(self, edge: _Edge, gradient: torch.Tensor) -> None:
        self._look()
        if not self._gradients:
            engine.after_this_backward(self._gradients.clear)
        self._gradients[edge] = weakref.ref(gradient)

    def at(self, edge: _Edge) -> torch.Tensor | None:
        """Return the gradient that is on its way to the same place; None if autograd has none."""
        self._look()
        handed = self._gradients.get(edge)
        return handed() if handed is not None else None

    @property
    def is_empty(self) -> bool:
        """Whether no call has handed over anything in this backward."""
        self._look()
        return not self._gradients

    def _look(self) -> None:
        running = engine.running_backward()
        if running != self._backward:
            self._backward = running
            self._gradients.clear()


_ON_THEIR_WAY = _GradientsInFlight()
_OPEN: weakref.WeakSet[Sums] = weakref.WeakSet()
"""Of the calls that await their backward, or run it."""


class Sums:
    """The gradients of one call, on their way to places where gradients of other calls may go.

    `announce`: called with a placeholder to whose sum code outside the plan has added, in another
    order than plain PyTorch. `gradients`: of the call's graph, each with its
    placeholder.
    """

    def __init__(
        self, announce: Callable[[int], None], gradients: Sequence[tuple[Any, int]]
    ) -> None:
        self._announce = announce
        self._gradients = gradients
        self._edges: dict[int, _Edge] = {}
        self._begun: dict[int, torch.Tensor] = {}
        self._handed: dict[int, int] = {}
        self._watched: set[int] = set()
        self._noted: dict[int, weakref.ref[torch.Tensor]] = {}  # by address
        self._own_terms: dict[_Edge, weakref.ref[torch.Tensor]] = {}  # sums of one own term
        _OPEN.add(self)

    def watch(self, position: int, owner: torch.Tensor) -> None:
        """Say it if a gradient that is a sum is added to a gradient from outside the plan.

        Plain PyTorch adds one term after the other, so the result may differ in its last bit. A
        gradient that came later was added into ours, as plain PyTorch does.
        """
        self._watched.add(position)
        waiting = weakref.ref(self)  # the parameter must not keep a call alive

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is None:  # a backward came by that has none for it
                return
            handle.remove()
            sums = waiting()
            own = sums._handed.pop(position, None) if sums is not None else None
            if sums is not None and own is not None and own != gradient.data_ptr():
                sums._announce(position)

        handle = owner.register_hook(arrived)
        weakref.finalize(self, handle.remove).atexit = False

    def start(self, node: Any, groups: Sequence[Sequence[int]]) -> None:
        """Note where gradients go, if others may go there, too.

        `node`: the first node of the call's chain in autograd's graph. `groups`: the placeholders
        whose gradients each node of the chain hands over.
        """
        if len(_OPEN) == 1 and _ON_THEIR_WAY.is_empty:
            return
        self._edges.update(gradient_edges(node, groups))

    def begin(self, position: int, term: torch.Tensor) -> torch.Tensor:
        """Return the begin of a sum: its first term, added to gradients of other calls."""
        edge = self._edges.get(position)
        before = _ON_THEIR_WAY.at(edge) if edge is not None else None
        if edge is None or before is None or self._is_own_term(edge, before):
            return term
        self._begun[position] = before
        return before.add_(term)

    def hand_over(self, positions: Sequence[int], gradients: list[torch.Tensor | None]) -> None:
        """Note gradients that are handed over; those added to others on their way become None.

        `positions`: the placeholders of the gradients. `gradients`: those; None takes the place of
        a gradient that was added to another on its way.
        """
        if not (self._edges or self._watched):
            return
        for place, position in enumerate(positions):
            gradient, edge = gradients[place], self._edges.get(position)
            if gradient is None:
                continue
            if edge is not None:
                gradients[place], gradient = self._received(position, edge, gradient)
            if position in self._watched:
                self._handed[position] = gradient.data_ptr()

    def _received(
        self, position: int, edge: _Edge, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the form of a gradient for autograd, and the tensor that it is in."""
        before = self._begun.pop(position, None)
        if before is not None:
            if before.data_ptr() != gradient.data_ptr():
                before.copy_(gradient)
            return None, before
        before = _ON_THEIR_WAY.at(edge)
        if before is None and not is_without_gaps(gradient):
            return gradient, gradient  # autograd adds nothing to it in place
        if before is None:
            own = gradient if self._is_own(position, gradient) else gradient.clone()
            noted = weakref.ref(own)
            self._noted[own.data_ptr()] = noted
            if position not in self._watched:
                self._own_terms[edge] = noted
            _ON_THEIR_WAY.note(edge, own)
            return own, own
        if self._is_own_term(edge, before):
            return gradient, gradient  # one tensor given twice: autograd adds both
        if position not in self._watched and before.dtype == gradient.dtype:
            return None, before.add_(gradient)  # one term: autograd would add it the same way
        return gradient, gradient

    def _is_own_term(self, edge: _Edge, gradient: torch.Tensor) -> bool:
        """Whether the gradient on its way is one term that this call has handed over itself."""
        own = self._own_terms.get(edge)
        return own is not None and own() is gradient

    def _is_own(self, position: int, gradient: torch.Tensor) -> bool:
        """Whether nothing else uses the memory of a gradient.

        Once a gradient has passed on, its memory may have been freed and be another's
        now. Storages are not asked: autograd adds in place only where Python has never seen them.
        """
        if not private.has_memory(gradient):
            return False
        noted = self._noted.get(gradient.data_ptr())
        if noted is None:
            return True
        return noted() is None and position not in self._in_one_memory

    @cached_property
    def _in_one_memory(self) -> frozenset[int]:
        """The placeholders whose gradients share memory with gradients of others."""
        found: dict[int, list[int]] = {}
        for node, position in self._gradients:
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            if isinstance(value, torch.Tensor):
                found.setdefault(private.storage_key(value), []).append(position)
        return frozenset(p for positions in found.values() if len(positions) > 1 for p in positions)

    def end(self, *, goes_on: bool) -> None:
        """Drop all but notes for when gradients arrive; `goes_on`: more backwards come."""
        if not goes_on:
            _OPEN.discard(self)
        self._noted.clear()
        self._own_terms.clear()
        self._edges.clear()
        self._begun.clear()
