"""The gradients of outputs that are computed from other outputs of a call."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import unserializable_hook

from tightfit.allocator.refusals import budget_exceeded, is_refusal
from tightfit.capture.joint_graph import JointGraph
from tightfit.execution import refused
from tightfit.execution.again import (
    Again,
    DifferentiatedCall,
    EagerForward,
    again_of,
    nodes_until,
)
from tightfit.execution.inner.levels import levels_of
from tightfit.execution.inner.made_again import Made, MadeAgain
from tightfit.execution.reached import Reached
from tightfit.execution.returned import Returned, raw_outputs
from tightfit.execution.sums import Sums, outside_term_message
from tightfit.torch_private import engine


class Call(Protocol):
    """A planned call, such as `execution.runtime.Run`."""

    runner: Any
    reached: Reached
    sums: Sums | None
    tell: Callable[[str], None]

    def ran_within(self, within: AbstractContextManager[Any]) -> EagerForward:
        """Run the call again under autograd, within a context."""


class InnerOutputs:
    """How outputs leave the calls of one captured step, where some are computed from others.

    `levels`: those outputs, the first computed first. `first`: all others with a history. `read`:
    the outputs that others are computed from. `watched`: views among these. `handed`: the
    placeholders that may have gradients.
    """

    def __init__(
        self, joint: JointGraph, returned: Returned, groups: Sequence[Sequence[int]]
    ) -> None:
        own = [i for i in returned.plain if returned.has_history(i)]
        found = levels_of(joint, own)
        self.joint = joint
        self.levels = found.levels
        self.read, self.watched = found.read, found.watched
        self.first = frozenset(own).difference(*(level.outputs for level in found.levels))
        self.handed = [p for group in groups for p in group] if found.levels else []
        self.made_again = MadeAgain()


class InnerParts:
    """The gradients of one call's outputs that others of its outputs are computed from.

    Gradients of the others go past them into the chain of nodes. A hook on one would see only the
    part of its gradient that comes from outside of the call, and a derivative by it nothing. Where
    a backward looks at one in such a way, the call runs again under autograd, on these outputs.
    """

    def __init__(self, known: InnerOutputs) -> None:
        self.known = known
        self._levels: dict[int, weakref.ref[InnerLevel]] = {}
        self._visible: dict[int, weakref.ref[torch.Tensor]] = {}
        self._hooks: dict[int, Mapping[int, Any]] = {}
        self._watched: list[weakref.ref[torch.Tensor]] = []
        self._coming: dict[int, list[tuple[DifferentiatedCall, torch.Tensor]]] = {}
        self._marks: dict[int, torch.Tensor] = {}
        self._sent: dict[int, tuple[torch.Tensor | None, Callable[[], None] | None]] = {}
        self.is_computing = False  # gradients that go on from these outputs, in a backward within

    def level(self, number: int, node: Any) -> InnerLevel:
        """Return the level of the outputs that leave through an autograd node, which holds it."""
        found = InnerLevel(self, number, weakref.ref(node))
        self._levels[number] = weakref.ref(found)
        return found

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Have whole gradients come to outputs that others are computed from."""
        self._watched = [weakref.ref(outputs[i]) for i in self.known.watched]
        raw = raw_outputs(self.known.joint, outputs)
        for i in self.known.read:
            raw[i].register_hook(self._adding(i))
            self._visible[i] = weakref.ref(raw[i])
            self._hooks[i] = raw[i]._backward_hooks  # type: ignore[assignment]

    def is_looked_at(self, index: int, edge: tuple[Any, int]) -> bool:
        """Whether the backward that runs now asks for the gradient of an output, or a hook does."""
        x = self._visible[index]()
        is_kept = x is not None and x.retains_grad
        return is_kept or len(self._hooks[index]) > 1 or engine.is_asked_for(edge)

    def refuse_views(self) -> None:
        """Refuse to look at views of outputs: gradients of what is computed from them go by."""
        for x in (reference() for reference in self._watched):
            if x is not None and (
                x._backward_hooks or x.retains_grad or engine.is_asked_for((x.grad_fn, x.output_nr))
            ):
                raise refused.looks_at_parts()

    def run_again(self, call: Call) -> None:
        """Run the call again, on outputs that others are computed from; give each level its own."""
        given = self._given()
        call.tell(
            f"{_name_of(call)}: a hook or a derivative looks at an output that others are computed "
            "from. For that its forward runs again, without a plan. To spare that, put the "
            "derivative into the plan, too (tightfit.step)"
        )
        made, inputs, handed = self._made_again(call, given)
        inputs = {**inputs, **{_number(i): x for i, x in given.items()}}
        added = frozenset(map(_number, given))
        own, called = weakref.ref(self), weakref.ref(call)

        def once_more() -> Mapping[int, torch.Tensor]:
            parts, call = own(), called()
            assert parts is not None and call is not None
            return parts._made_again(call, parts._given())[0].outputs

        levels = [(n, found) for n, known in self._levels.items() if (found := known()) is not None]
        for number, level in levels:
            outputs = {i: made.outputs[i] for i in self.known.levels[number].outputs}
            level.goes_through(Again(outputs, inputs, handed | added, added), once_more)
        ends = {get_gradient_edge(x).node for x in inputs.values()}
        nodes = {i: x.grad_fn for i, x in made.outputs.items() if x.grad_fn is not None}
        groups = [self.known.first, *(level.outputs for level in self.known.levels)]
        each = (nodes_until([nodes[i] for i in group if i in nodes], ends) for group in groups)
        passed = Counter(node for own in each for node in own)
        replaced = {i: nodes[i] for i in made.replaced}
        for _, level in levels:
            level.note_shared(replaced, {node for node, times in passed.items() if times > 1})

    def _given(self) -> dict[int, torch.Tensor]:
        """Return the outputs that others are computed from, which must exist."""
        found = {i: x for i, reference in self._visible.items() if (x := reference()) is not None}
        if len(found) < len(self.known.read):
            raise refused.looks_at_parts()
        return found

    def _made_again(
        self, call: Call, given: Mapping[int, torch.Tensor]
    ) -> tuple[Made, Mapping[int, torch.Tensor], frozenset[int]]:
        """Return what a call makes on outputs; its inputs, and those with a gradient."""
        joint, ran = self.known.joint, list[EagerForward]()

        def run(within: AbstractContextManager[Any]) -> Mapping[int, torch.Tensor]:
            ran[:] = [call.ran_within(within)]
            return raw_outputs(joint, ran[0].outputs)

        found = self.known.made_again.ran(run, given)
        if found is None:
            raise refused.looks_at_parts()
        whole = again_of(joint, ran[0])
        return found, whole.inputs, whole.handed

    # -- whole gradients ----------------------------------------------------------------------

    def computed(
        self, again: DifferentiatedCall, by_position: Mapping[int, torch.Tensor | None]
    ) -> dict[int, torch.Tensor | None]:
        """Return the gradients of inputs that come from some outputs, past no others."""
        self.is_computing = True
        try:
            return again.gradients(by_position, {})
        finally:
            self.is_computing = False

    def mark(
        self, index: int, again: DifferentiatedCall, part: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Keep a part of an output's gradient until all else is there; return what stands for it.

        Minus zero, which leaves what it is added to as it is.
        """
        if part is None:
            return None
        self._coming.setdefault(index, []).append((again, part))
        zero = torch.zeros((), dtype=part.dtype, device=part.device).neg()
        mark = self._marks[index] = zero.expand(part.shape)
        return mark

    def sent(
        self, call: Call, index: int, again: DifferentiatedCall, part: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return a part of an output's gradient, to be added to the rest by autograd.

        Where a backward goes on from a node, it takes the gradient it was asked for before hooks.
        """
        if part is not None and again.is_sum(_number(index)):
            self._sent[index] = part, partial(_tell_of_sum, call.tell, index, _name_of(call))
            again.finish(_number(index))
        return part

    def _adding(self, index: int) -> Callable[[Any], Any]:
        own = weakref.ref(self)

        def adding(gradient: torch.Tensor | None) -> torch.Tensor | None:
            parts = own()
            return None if parts is None else parts._whole(index, gradient)

        return unserializable_hook(adding)  # else saving an output would warn of it

    def _whole(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return an output's whole gradient, in plain PyTorch's order; None: it is whole."""
        coming, mark = self._coming.pop(index, []), self._marks.pop(index, None)
        part, tell_of_sum = self._sent.pop(index, (gradient, None))
        if tell_of_sum is not None and gradient is not part:
            tell_of_sum()
        total = None if gradient is mark else gradient
        for call, part in coming:
            total = part if total is None else call.added_to(total, _number(index), part)
            call.finish(_number(index))
        return total if coming else None


class InnerLevel:
    """The outputs of a call that leave it through one node, and how gradients go on from there."""

    def __init__(self, parts: InnerParts, number: int, node: weakref.ref[Any]) -> None:
        self._parts = parts
        self._known = parts.known.levels[number]
        self.outputs = self._known.outputs
        self._node = node
        self._again: DifferentiatedCall | None = None
        self._is_differentiated = False  # its gradients have a history: it stays run again
        self._shares = False  # what it is computed from with what other outputs are

    def gradients(
        self, call: Call, gradients: Sequence[torch.Tensor | None], node: Any
    ) -> list[torch.Tensor | None] | None:
        """Return the gradients that go on from here; None: they go on as they are."""
        parts, level = self._parts, self._known
        if parts.is_computing:  # the gradients of a level after this
            return [None] * (len(gradients) + len(level.reads))
        parts.refuse_views()
        if self._again is None:
            edges = node.next_functions[len(level.outputs) :]
            if all(gradient is None for gradient in gradients) or not any(
                map(parts.is_looked_at, level.reads, edges)
            ):
                return None
        try:
            if self._again is None:
                parts.run_again(call)
            return self._computed(call, gradients, node)
        except BaseException as error:
            if is_refusal(error):
                raise budget_exceeded(error, _TAKES) from error
            raise

    def _computed(
        self, call: Call, gradients: Sequence[torch.Tensor | None], node: Any
    ) -> list[torch.Tensor | None]:
        again, parts, level = self._again, self._parts, self._known
        assert again is not None
        handed = parts.known.handed
        goes_on = again.hands_over(handed)
        if self._shares and (goes_on or torch.is_grad_enabled()):
            raise refused.shares_inside()
        by_position = dict(zip(level.outputs, gradients, strict=True))
        call.reached.note_inside(frozenset(i for i, x in by_position.items() if x is not None))
        found = parts.computed(again, by_position)
        self._is_differentiated |= torch.is_grad_enabled()
        if not self._is_differentiated:
            engine.after_this_backward(self._forget)
        read = [
            parts.sent(call, i, again, found.get(_number(i)))
            if goes_on and engine.is_asked_for(edge)
            else parts.mark(i, again, found.get(_number(i)))
            for i, edge in zip(level.reads, node.next_functions[len(gradients) :], strict=False)
        ]
        if call.sums is not None:
            call.sums.put_first({p: x for p in handed if (x := found.get(p)) is not None})
        return [*[None] * len(gradients), *read]

    def goes_through(
        self, again: Again, once_more: Callable[[], Mapping[int, torch.Tensor]]
    ) -> None:
        """Have gradients go through a forward that was run again, until the backward ends."""
        if self._again is None:
            self._again = DifferentiatedCall(again, (), once_more=once_more, node=self._node)
            engine.after_this_backward(self._forget)

    def note_shared(self, replaced: Mapping[int, Any], shared: Set[Any]) -> None:
        """Note nodes that gradients of several levels go through, and nodes that none should.

        `replaced`: those of the tensors whose places outputs have taken.
        """
        assert self._again is not None
        inside = self._again.inside()
        if not inside.isdisjoint(replaced[i] for i in self._known.reads):
            raise refused.looks_at_parts()
        self._shares = not inside.isdisjoint(shared)

    def _forget(self) -> None:
        if not self._is_differentiated:
            self._again = None


def _name_of(call: Call) -> str:
    return call.runner.captured.graph.name


def _tell_of_sum(tell: Callable[[str], None], output: int, name: str) -> None:
    tell(outside_term_message(f"output {output}", name))


def _number(output: int) -> int:
    """Return the number of an output among placeholders."""
    return -1 - output


_TAKES = (
    "The whole gradient of an output that others are computed from takes as much memory as in "
    "plain PyTorch."
)
