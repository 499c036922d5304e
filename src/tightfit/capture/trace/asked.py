"""Which gradients the tracer asks for, and of how many terms each of them is."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from tightfit.capture.trace.terms import terms_of_gradients
from tightfit.torch_private import core as private


class AskedGradients:
    """Receives the outputs of a traced forward, and then the gradients that are asked for.

    `terms`: of the gradient of each input that may have one. `receives`: whether each output that
    could receive a gradient may: of some it is known that they get none.
    """

    def __init__(self) -> None:
        self.terms: list[int] = []
        self.receives: list[bool] = []
        self._returned: list[torch.Tensor] = []
        self._detached: Set[int] = frozenset()

    def expect(self, returned: list[torch.Tensor], detached: Set[int]) -> None:
        """Note the outputs of a traced forward, and which of them receive no gradient."""
        self._returned, self._detached = returned, detached

    def __call__(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Sequence[bool]:
        """Return which outputs may receive a gradient; a base that is viewed if a view may."""
        own = {id(t): {i} for i, t in enumerate(self._returned)}
        views: dict[int, set[int]] = {}
        for i, t in enumerate(self._returned):
            if t.requires_grad:
                views.setdefault(id(private.viewed(t)), set()).add(i)
        of = [own.get(id(o)) or views.get(id(o), set[int]()) for o in outputs]
        self.receives = [not each or not each <= self._detached for each in of]
        kept = [output for output, may in zip(outputs, self.receives, strict=True) if may]
        self.terms = terms_of_gradients(kept, inputs)
        self._returned = []
        return self.receives
