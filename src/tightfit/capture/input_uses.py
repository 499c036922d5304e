"""Gradients of an input, one for each of its uses, in the order in which autograd adds them.

Autograd adds the gradients of a tensor one after the other, wherever they come from. A part of a
model may not add up the gradients of its own uses first: if the tensor is used elsewhere too, the
sum would round differently. Examples are a skip connection, and an encoder's output that every
layer of a decoder reads. So each use is traced as an input of its own, and autograd adds their
gradients.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.capture.calls.structure import flatten
from tightfit.capture.captured import Captured
from tightfit.capture.traced_call import TracedCall
from tightfit.torch_private import core as private
from tightfit.torch_private.patches import inside_of


def captured_by_uses(
    capture: Callable[[TracedCall], Captured], call: TracedCall
) -> tuple[Captured, tuple[int, ...]]:
    """Capture a call such that inputs with several uses have a gradient for each.

    Returns the capture of a call with further inputs behind its own (flattened), and the place of
    the input that each of them repeats.
    """
    uses = _Uses(call, ())
    captured = capture(uses.noted(call))
    counts = Counter(uses.order)
    if max(counts.values(), default=0) < 2 or not uses.written.isdisjoint(counts):
        return captured, ()
    uses = _Uses(call, uses.order)
    captured = capture(uses.noted(call))
    return dataclasses.replace(captured, in_turn=_in_turn(captured, uses)), uses.repeated


def _in_turn(captured: Captured, uses: _Uses) -> dict[int, int]:
    """Return, by the placeholder of a use, that of the use before; first uses have none."""
    joint = captured.joint
    with_gradient = {position for _, position in joint.gradients}
    places = {
        source.index: position
        for position, source in enumerate(joint.sources)
        if source.kind == "input" and position in with_gradient
    }
    before: dict[int, int] = {}
    turns: dict[int, int] = {}
    for index, place in enumerate(uses.repeated, start=uses.given):
        position = places.get(index)
        if position is not None:
            if place in before:
                turns[position] = before[place]
            before[place] = position
    return turns


class _Uses:
    """A call in whose forward every use of an input is an input of its own.

    `order`: for each use, the last first, the place of its input among the flattened inputs.
    Empty: uses are only noted. `given`: how many flattened inputs the call has.
    """

    def __init__(self, call: TracedCall, order: Sequence[int]) -> None:
        self.repeated = tuple(order)
        self.written: set[int] = set()
        self._found: list[list[int]] = []
        self.around = call.function
        leaves = call.leaves
        self.given = len(leaves)
        self._trained = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]

    def noted(self, call: TracedCall) -> TracedCall:
        """Return a call that notes its uses; it is not held here."""
        leaves = call.leaves
        again = [leaves[place].detach().requires_grad_() for place in self.repeated]
        given = (call.args, call.kwargs, again)
        return dataclasses.replace(call, function=self, args=given, kwargs={})

    @property
    def order(self) -> list[int]:
        """The places of the uses found, the last operator first, an operator's own in its order."""
        return [place for places in reversed(self._found) for place in places]

    def __call__(self, args: Any, kwargs: Any, again: list[torch.Tensor]) -> Any:
        leaves = flatten((args, kwargs))[0]
        self._found.clear()
        places = {id(leaves[place]): place for place in self._trained}
        instead = list(zip(self.repeated, again, strict=True))
        with _EachUse(places, instead, self._found, self.written):
            return self.around(*args, **kwargs)


class _EachUse(TorchFunctionMode):
    """Notes the uses of tensors, and puts others in their place: the first for the last use."""

    def __init__(
        self,
        places: dict[int, int],
        instead: list[tuple[int, torch.Tensor]],
        found: list[list[int]],
        written: set[int],
    ) -> None:
        super().__init__()
        self._places = places
        self._instead = instead
        self._found = found
        self._written = written

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, spec = private.pytree.tree_flatten((args, kwargs))
        used = [i for i, x in enumerate(leaves) if id(x) in self._places]
        if not used or not torch.is_grad_enabled() or not private.is_tracing():
            return func(*args, **kwargs)
        inside = inside_of(func, self)  # it may ask whether two of its inputs are the same
        if inside is not None:
            with inside:
                return func(*args, **kwargs)
        here = [self._places[id(leaves[i])] for i in used]
        if _writes(func):
            self._written.update(here)
        own = [leaves[i] for i in used]
        ahead = max(0, len(self._instead) - sum(map(len, self._found)) - len(used))
        others = self._instead[ahead : ahead + len(used)]
        if [place for place, _ in others] == here:  # else it has no gradient, such as a size
            for index, (_, other) in zip(used, others, strict=True):
                leaves[index] = other
        args, kwargs = private.pytree.tree_unflatten(leaves, spec)
        result = func(*args, **kwargs)
        for tensor, index in zip(own, used, strict=True):
            if result is leaves[index]:  # nothing was done, as by a cast to its own dtype
                return tensor
        outputs = private.pytree.tree_leaves(result)
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in outputs):
            self._found.append(here)
        return result


def _writes(function: Any) -> bool:
    """Whether a function of tensors may write into its arguments."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name == "__setitem__"
