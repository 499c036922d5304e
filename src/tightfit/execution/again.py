"""A call run again, plainly, for a backward that is to be differentiated itself.

A plan computes gradients without a history: with ``create_graph=True`` they would come out as
constants. Such a backward frees the plan's saved tensors, runs the forward once more under autograd
and differentiates that. From then on the call is held as plain PyTorch holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from tightfit.capture.joint_graph import JointGraph
from tightfit.errors import WITHOUT_A_PLAN, TightfitError
from tightfit.execution.returned import raw_outputs
from tightfit.torch_private import engine

__all__ = ["DifferentiatedCall", "RanPlainly", "Repeated"]


@dataclass(frozen=True)
class RanPlainly:
    """The results of a forward that was run again under autograd."""

    outputs: Sequence[Any]  # what it has returned, flattened
    inputs: Sequence[Any]  # its placeholders
    # The same where they are those of the call itself; None where another call was run again, too,
    # and has made what stands for one
    owners: Sequence[Any]


class Repeated(Protocol):
    """Runs a call again in its backward, where its plan does not do."""

    def plainly(self, instead: Callable[[Any, Any, int], Any]) -> RanPlainly:
        """Run it under autograd, on stand-ins for those inputs that other calls have made.

        `instead` is given an input, or None if it is gone, and which output of which run it was.
        """
        ...

    def outputs_once_more(self) -> list[Any]:
        """Run its forward once more, drawing what it drew; return its raw outputs."""
        ...

    def replanned(self, came: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor | None]:
        """Plan it for the gradients of outputs that came; return those of placeholders."""
        ...

    def once_more(
        self, came: dict[int, torch.Tensor], begun: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> Iterator[dict[int, torch.Tensor | None]]:
        """Run it for a further backward; return the gradients of placeholders as they come.

        `begun` tells what the sum that a gradient is begins with, as of `Program`.
        """
        ...

    def retained(self) -> None:
        """Note that a further backward may come: what is there now must be there then."""
        ...


class DifferentiatedCall:
    """A call whose gradients are differentiated.

    Every backward that is differentiated goes through one forward that was run again: what is
    derived of their gradients meets there, in the order of plain PyTorch. Calls whose outputs it
    takes are run again before it: all of them are one graph of autograd's, whose gradients the last
    call computes for those before.

    `ran`: its forward that was run again.
    """

    def __init__(
        self, joint: JointGraph, ran: RanPlainly, before: Sequence[DifferentiatedCall]
    ) -> None:
        pairs = enumerate(zip(ran.inputs, ran.owners, strict=True))
        own = {p: x for p, (x, owner) in pairs if x is owner}
        self._owners = {p: own[p] for _, p in joint.gradients if p in own}
        self._ends = {engine.gradient_node(x) for x in own.values() if _has_history(x)}
        raw = raw_outputs(joint, ran.outputs)
        self._made = {i: x for i, x in raw.items() if x.requires_grad}
        self._outputs = {i: get_gradient_edge(x) for i, x in self._made.items()}
        self._before = before
        self._computed: tuple[int, dict[int, torch.Tensor | None]] = (-1, {})

    def output(self, index: int, canonical: Mapping[int, int]) -> torch.Tensor | None:
        """Return a raw output as the forward that was run again has made it; None: it has not."""
        return next((x for i, x in self._made.items() if canonical.get(i, i) == index), None)

    def gradients(
        self, by_position: Mapping[int, torch.Tensor | None], canonical: Mapping[int, int]
    ) -> dict[int, torch.Tensor | None]:
        """Return the gradients that a backward asks for, by positions of placeholders.

        `by_position`: gradients of raw outputs. `canonical`: which of the raw outputs stands for
        others that are the same.
        """
        came = {
            base: gradient
            for base in self._outputs
            if (gradient := by_position.get(canonical.get(base, base))) is not None
        }
        (backward, computed), self._computed = self._computed, (-1, {})
        if backward == engine.running_backward():  # of what a later call has led here
            if any(bool(gradient.any()) for gradient in came.values()):
                raise _of_several()
            return computed
        if not came:
            return {}
        calls = self._calls()
        for call in calls:
            call._made = {}  # autograd holds of it what plain PyTorch does
        wanted = {call: call._wanted() for call in calls}
        if not any(wanted.values()):
            return {}
        if not torch.is_grad_enabled() and self._meets_its_derivative(calls):
            if any(bool(gradient.any()) for gradient in came.values()):
                raise _used_with()
            return {position: torch.zeros_like(x) for position, x in wanted[self].items()}
        asked = {id(x): x for each in wanted.values() for x in each.values()}
        found = torch.autograd.grad(
            [self._outputs[base] for base in came],
            list(asked.values()),
            list(came.values()),
            create_graph=torch.is_grad_enabled(),
            retain_graph=True,
            allow_unused=True,
        )
        gradients = dict(zip(asked, found, strict=True))
        for call in calls:  # what several calls take is handed over once
            own = {p: gradients.pop(id(x), None) for p, x in wanted[call].items()}
            call._computed = engine.running_backward(), own
        own, self._computed = self._computed[1], (-1, {})
        return own

    def _wanted(self) -> dict[int, torch.Tensor]:
        """Return the placeholders whose gradients the backward that runs now asks for.

        Those are left out that another call has made: their gradients stay within.
        """
        return {p: x for p, x in self._owners.items() if engine.asks_for_gradient(x)}

    def _calls(self) -> list[DifferentiatedCall]:
        """Return the call and all that were run again before it."""
        found = {self: None}
        waiting = [self]
        while waiting:
            before = [call for call in waiting.pop()._before if call not in found]
            found |= dict.fromkeys(before)
            waiting += before
        return list(found)

    def _meets_its_derivative(self, calls: Sequence[DifferentiatedCall]) -> bool:
        """Whether the backward that runs now goes through forwards that were run again."""
        seen = {node for call in calls for node in call._ends}
        waiting = [edge.node for edge in self._outputs.values()]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if engine.runs_in_this_backward(node):
                return True
            waiting.extend(before for before, _ in node.next_functions if before is not None)
        return False


def _has_history(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _of_several() -> TightfitError:
    return TightfitError(
        "outputs of several graphs of a model go back together in a backward that is "
        "differentiated (create_graph=True). They meet inside, where plain PyTorch adds in another "
        "order, and gradients would differ in their last bits. Put together inside of the fitted "
        "module what the derivative is taken of (have it return their sum, say), or take the "
        f"derivative inside of it. {WITHOUT_A_PLAN}"
    )


def _used_with() -> TightfitError:
    return TightfitError(
        "a loss goes back through an output of a tightfit step together with its derivative "
        "(create_graph=True). Both meet inside of the step, where plain PyTorch adds in another "
        "order, and gradients would differ in their last bits. Take the derivative inside of what "
        "is planned (tightfit.step), or call the model once more for what else takes its output. "
        f"{WITHOUT_A_PLAN}"
    )
