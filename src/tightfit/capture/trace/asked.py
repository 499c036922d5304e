"""Which gradients the tracer asks for, and of how many terms each of them is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.torch_private import core as private
from tightfit.torch_private import engine


class AskedGradients(TorchFunctionMode):
    """Receives the outputs of a traced forward, and then traces the gradients that are asked for.

    `terms`: of the gradient of each input that may have a gradient. `receives`: whether each output
    that could receive a gradient may: of some it is known that they get none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.terms: list[int] = []
        self.receives: list[bool] = []
        self._returned: list[torch.Tensor] = []
        self._detached: Set[int] = frozenset()
        self._is_awaited = False

    def begin(self) -> None:
        """Note that a traced forward begins: derivatives it takes itself are its own."""
        self._is_awaited = False

    def expect(self, returned: list[torch.Tensor], detached: Set[int]) -> None:
        """Note the outputs of a traced forward, and which of them receive no gradient."""
        self._returned, self._detached = returned, detached
        self._is_awaited = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.autograd.grad or not self._is_awaited:
            return func(*args, **(kwargs or {}))
        return self._traced(*args, **(kwargs or {}))

    def _traced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], grad_outputs: Sequence[Any], **how: Any
    ) -> Any:
        self.receives = self._may_receive(outputs)
        every = zip(outputs, grad_outputs, self.receives, strict=True)
        given = [(output, gradient) for output, gradient, may in every if may]
        self.terms = _terms_of_gradients([output for output, _ in given], inputs)
        self._returned = []
        if not given:
            return (None,) * len(inputs)
        kept, gradients = zip(*given, strict=True)
        return torch.autograd.grad(kept, inputs, gradients, **how)

    def _may_receive(self, outputs: Sequence[torch.Tensor]) -> list[bool]:
        """Return which outputs may receive a gradient; a base that is viewed if a view may."""
        own = {id(t): {i} for i, t in enumerate(self._returned)}
        views: dict[int, set[int]] = {}
        for i, t in enumerate(self._returned):
            if t.requires_grad:
                views.setdefault(id(private.viewed(t)), set()).add(i)
        of = [own.get(id(o)) or views.get(id(o), set[int]()) for o in outputs]
        return [not each or not each <= self._detached for each in of]


def _terms_of_gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[int]:
    """Return for each input from how many operators its gradient comes: autograd adds these up.

    `outputs`: whose gradients come in. `inputs`: whose gradients are asked for.
    """
    arriving = Counter(map(engine.gradient_edge, outputs))
    seen = {node for node, _ in arriving}
    waiting = list(seen)
    while waiting:
        for edge in waiting.pop().next_functions:
            arriving[edge] += 1
            if edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                waiting.append(edge[0])
    return [arriving[engine.gradient_edge(each)] for each in inputs]
