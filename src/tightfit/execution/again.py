"""A call run again under autograd, for a backward that is to be differentiated itself.

A plan computes gradients without a history: with ``create_graph=True`` they would come out as
constants. Such a backward frees the plan's saved tensors, runs the forward once more under autograd
and differentiates that. From then on the call is held as plain PyTorch holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tightfit.capture.joint_graph import JointGraph
from tightfit.errors import WITHOUT_A_PLAN, TightfitError
from tightfit.execution import refused
from tightfit.execution.returned import raw_outputs
from tightfit.torch_private import engine


@dataclass(frozen=True)
class EagerForward:
    """The results of a forward that was run again under autograd."""

    outputs: Sequence[Any]  # its outputs, flattened
    inputs: Sequence[Any]  # its placeholders
    # The same where they are those of the call itself; None where another call was run again, too,
    # and has made the stand-in
    owners: Sequence[Any]


class Repeatable(Protocol):
    """A call that can be run again in its backward, where its plan does not suffice."""

    def eager_forward(self, stand_in: Callable[[Any, Any, int], Any]) -> EagerForward:
        """Run its forward under autograd, on stand-ins for inputs that other calls have made.

        `stand_in` is given an input (None if it is gone), the call that made it, and the number of
        the output.
        """

    def outputs_once_more(self) -> list[Any]:
        """Run its forward once more, with the same random numbers; return its raw outputs."""

    def replanned(
        self, grad_outputs: Mapping[int, torch.Tensor]
    ) -> Mapping[int, torch.Tensor | None]:
        """Plan it for the gradients of outputs; return gradients of placeholders."""

    def once_more(
        self,
        grad_outputs: dict[int, torch.Tensor],
        begin_sum: Callable[[int, torch.Tensor], torch.Tensor],
        unread: Set[int],
    ) -> Iterator[dict[int, torch.Tensor | None]]:
        """Run it for a further backward; return an iterator over gradients of placeholders.

        `begin_sum`: returns the first term of the sum of a gradient, as of `Program`. `unread`:
        placeholders that may have changed: gradients from these outputs do not depend on them.
        """

    def retained(self) -> None:
        """Note that a further backward may come: tensors that exist now must exist then."""

    def may_free(self) -> bool:
        """Whether the call can be run once more for its first backward, as things are now."""

    def promises(self) -> bool:
        """Whether the call can be run once more later on; it holds what that takes, then."""

    def freed(self) -> None:
        """Note that saved tensors were freed before the first backward, to keep to a limit."""


class DifferentiatedCall:
    """A call whose gradients are differentiated.

    Every backward that is differentiated goes through one forward that was run again: derivatives
    of their gradients meet there, in the order of plain PyTorch. Calls whose outputs it takes are
    run again before it: all of them are one graph of autograd's, whose gradients the last call
    computes for those before.

    A later backward may come to that forward twice: from a derivative, which leads into it, and
    from an output, which leads to the node of the call. Plain PyTorch adds both up inside. So a
    gradient from a derivative waits for the node of the call, which goes on with both. Where that
    backward frees the forward's saved tensors, it is run once more.

    `ran`: its forward that was run again. `repeatable`: runs it. `node`: the first node of the call
    in autograd's graph.
    """

    def __init__(
        self,
        joint: JointGraph,
        ran: EagerForward,
        before: Sequence[DifferentiatedCall],
        *,
        repeatable: Repeatable,
        node: weakref.ref[Any],
    ) -> None:
        self._joint = joint
        # holds the call's inputs; several calls are not run once more
        self._repeatable = None if before else repeatable
        self._is_over = False
        pairs = enumerate(zip(ran.inputs, ran.owners, strict=True))
        own = {p: get_gradient_edge(x) for p, (x, o) in pairs if x is o and _has_history(x)}
        self._owners = {p: own[p] for _, p in joint.gradients if p in own}
        self._ends = {edge.node for edge in own.values()}
        self._inputs = [weakref.ref(ran.inputs[p]) for p in own]
        self._made = _made_by(joint, ran)
        self._outputs = {i: get_gradient_edge(x) for i, x in self._made.items()}
        self._returned = tuple(self._outputs)
        self._before = before
        self._after: weakref.WeakSet[DifferentiatedCall] = weakref.WeakSet()
        for call in before:
            call._after.add(self)
        self._node = node
        self._computed: tuple[int, dict[int, torch.Tensor | None]] = (-1, {})
        self._from_derivatives = FromDerivatives(self._takes_part)

    def output(self, index: int, canonical: Mapping[int, int]) -> torch.Tensor | None:
        """Return a raw output as the forward that was run again has made it; None: it has not."""
        return next((x for i, x in self._made.items() if canonical.get(i, i) == index), None)

    def gradients(
        self, by_position: Mapping[int, torch.Tensor | None], canonical: Mapping[int, int]
    ) -> dict[int, torch.Tensor | None]:
        """Return the gradients that a backward asks for, by positions of placeholders.

        `by_position`: gradients of raw outputs. `canonical`: which of the raw outputs represents
        others that are the same.
        """
        (backward, computed), self._computed = self._computed, (-1, {})
        is_computed = backward == engine.running_backward()  # of gradients led here by a later call
        if self._is_over and not is_computed:
            raise refused.second_time(is_freed=False)
        grad_outputs = {
            base: gradient
            for base in self._returned
            if (gradient := by_position.get(canonical.get(base, base))) is not None
        }
        if is_computed:
            if any(bool(gradient.any()) for gradient in grad_outputs.values()):
                raise _of_several()
            return computed
        waiting = self._from_derivatives.taken()
        if not (grad_outputs or waiting.gradients):
            return {}
        calls = self._calls()
        for call in calls:
            call._made = {}  # autograd holds the same of it as in plain PyTorch
        wanted = {call: call._wanted() for call in calls}
        if not any(wanted.values()):
            return {}
        asked = {_key(edge): edge for each in wanted.values() for edge in each.values()}
        edges = self._edges(grad_outputs, waiting, calls)
        inputs = (x for call in calls for known in call._inputs if (x := known()) is not None)
        with engine.without_hooks(inputs):
            found = torch.autograd.grad(
                edges,
                list(asked.values()),
                [*grad_outputs.values(), *waiting.gradients.values()],
                create_graph=torch.is_grad_enabled(),
                retain_graph=engine.keeps_graph(),
                allow_unused=True,
            )
        gradients = dict(zip(asked, found, strict=True))
        for call in calls:  # inputs of several calls are handed over once
            own = {p: gradients.pop(_key(edge), None) for p, edge in wanted[call].items()}
            call._computed = engine.running_backward(), own
        if torch.is_grad_enabled():
            self._from_derivatives.watch(self._inside(self._outputs, calls))
        own, self._computed = self._computed[1], (-1, {})
        if not engine.keeps_graph():
            for call in calls:
                call._release()
        return own

    def _release(self) -> None:
        """Hold nothing any more, as plain PyTorch after a backward that keeps no graph."""
        self._owners, self._ends, self._outputs = {}, set(), {}
        self._before, self._repeatable, self._is_over = (), None, True
        self._from_derivatives = FromDerivatives(self._takes_part)

    def _wanted(self) -> dict[int, GradientEdge]:
        """Return the placeholders whose gradients the backward that runs now asks for.

        Those are left out that another call has made: their gradients stay within.
        """
        owners = self._owners.items()
        return {p: edge for p, edge in owners if engine.asks_for_gradient(edge.node)}

    def _calls(self) -> list[DifferentiatedCall]:
        """Return the call and all that were run again before it."""
        found = {self: None}
        waiting = [self]
        while waiting:
            before = [call for call in waiting.pop()._before if call not in found]
            found |= dict.fromkeys(before)
            waiting += before
        return list(found)

    def _takes_part(self) -> bool:
        """Whether the backward that runs now comes to the call, and to none that took its outputs.

        Gradients from derivatives wait for the last call that was run again.
        """
        node = self._node()
        is_reached = node is not None and engine.runs_in_this_backward(node)
        return is_reached and not any(call._takes_part() for call in self._after)

    def _edges(
        self, grad_outputs: Collection[int], waiting: Waiting, calls: Sequence[DifferentiatedCall]
    ) -> list[GradientEdge]:
        """Return where gradients of raw outputs go, and then where waiting gradients go.

        A backward that keeps no graph has freed the forward's saved tensors on its way.
        """
        outputs, nodes = self._outputs, self._from_derivatives.nodes
        if waiting.is_reached and not engine.keeps_graph():
            if self._repeatable is None:
                raise _used_with("through several graphs of the model")
            ran = self._repeatable.eager_forward(lambda given, run, output: None)
            outputs = {i: get_gradient_edge(x) for i, x in _made_by(self._joint, ran).items()}
            nodes = [*self._inside(outputs, calls)]
        edges = [outputs[base] for base in grad_outputs]
        return [*edges, *(GradientEdge(nodes[index], nr) for index, nr in waiting.gradients)]

    def _inside(
        self, outputs: Mapping[int, GradientEdge], calls: Sequence[DifferentiatedCall]
    ) -> Collection[Any]:
        """Return autograd's nodes from raw outputs on, up to the nodes of inputs."""
        ends = {node for call in calls for node in call._ends}
        found: dict[Any, None] = {}
        following = [edge.node for edge in outputs.values()]
        while following:
            node = following.pop()
            if node not in found and node not in ends and node.next_functions:
                found[node] = None
                following.extend(before for before, _ in node.next_functions if before is not None)
        return found


@dataclass(frozen=True)
class Waiting:
    """Gradients that derivatives have led into a forward in the backward that runs now."""

    is_reached: bool  # whether the backward has come there at all
    gradients: Mapping[tuple[int, int], torch.Tensor]  # by the index of a node, and place at it


class FromDerivatives:
    """Gradients that derivatives lead into a forward that was run again, until its call goes on.

    `waits`: whether the backward that runs now comes to that call.
    """

    def __init__(self, waits: Callable[[], bool]) -> None:
        self._waits = weakref.WeakMethod(waits)
        self.nodes: Sequence[Any] = ()
        self._waiting: dict[tuple[int, int], torch.Tensor] = {}
        self._reached_in = -1  # the last backward that came to the forward
        self._taken_in = -1  # the backward in which the call went on last

    def watch(self, nodes: Collection[Any]) -> None:
        """Have gradients for autograd's nodes wait; once."""
        if self.nodes:
            return
        self.nodes = [*nodes]
        own = weakref.ref(self)

        def stopped(index: int) -> Callable[[Any], Any]:
            def arrived(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
                found = own()
                return found._arrived(index, gradients) if found is not None else None

            return arrived

        for index, node in enumerate(self.nodes):
            node.register_prehook(stopped(index))

    def taken(self) -> Waiting:
        """Return gradients that have come in this backward; they wait no longer."""
        waiting, self._waiting = self._waiting, {}
        self._taken_in = engine.running_backward()
        is_reached = self._reached_in == self._taken_in
        return Waiting(is_reached, waiting if is_reached else {})

    def _arrived(self, index: int, gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep gradients that come to a node, and let none pass; None: they pass."""
        waits = self._waits()
        if waits is None or not waits():
            return None
        own = {(index, nr): x for nr, x in enumerate(gradients) if x is not None}
        running = engine.running_backward()
        if own and self._taken_in == running:
            raise _used_with("and the derivative comes after the output")
        if self._reached_in != running:
            self._reached_in, self._waiting = running, {}
        self._waiting |= own
        return (None,) * len(gradients)


def _made_by(joint: JointGraph, ran: EagerForward) -> dict[int, torch.Tensor]:
    """Return the raw outputs that have a history."""
    return {i: x for i, x in raw_outputs(joint, ran.outputs).items() if x.requires_grad}


def _key(edge: GradientEdge) -> tuple[Any, int]:
    return edge.node, edge.output_nr


def _has_history(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _of_several() -> TightfitError:
    return TightfitError(
        "outputs of several graphs of a model go back together in a backward that is "
        "differentiated (create_graph=True). They meet inside, where plain PyTorch adds in another "
        "order, and gradients would differ in their last bits. Combine the outputs inside of "
        "the fitted module (have it return their sum, say), or take the "
        f"derivative inside of it. {WITHOUT_A_PLAN}"
    )


def _used_with(how: str) -> TightfitError:
    return TightfitError(
        "a loss goes back through an output of a tightfit step together with its derivative "
        f"(create_graph=True), {how}. Both meet inside of the step, and gradients would differ in "
        "their last bits. Take the derivative inside of the planned code (tightfit.step), or call "
        f"the model once more for other uses of its output. {WITHOUT_A_PLAN}"
    )
