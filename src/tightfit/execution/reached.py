"""Which outputs of a call have received gradients, in one backward or, retained, in several."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["Reached"]


class Reached:
    """The outputs that the backwards of one call have reached.

    `backwards`: how many have begun. `is_retained`: whether the last of them may be followed by
    another. `missing`, `unplanned`: the outputs without a gradient that were planned to have
    one in the last backward, and those with one that were not.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self.is_retained = False
        self.missing: tuple[int, ...] = ()
        self.unplanned: tuple[int, ...] = ()
        self._planned: frozenset[int] = frozenset()
        self._outputs = 0
        self._before: frozenset[int] = frozenset()

    def begin(
        self,
        came: Mapping[int, torch.Tensor | None],
        planned: frozenset[int],
        outputs: int,
        *,
        retained: bool,
    ) -> None:
        """Note the gradients with which a backward begins.

        `came`: the gradients of the raw outputs. `planned`: the raw outputs that are planned to
        receive one. `outputs`: how many outputs the call has; further raw ones are bases that
        several of them view. `retained`: whether another backward may come.
        """
        if self.backwards:
            self._before = self.used
        self.backwards += 1
        self._planned, self._outputs = planned, outputs
        self.is_retained = retained
        self.missing = tuple([i for i in planned if came.get(i) is None])
        self.unplanned = tuple([i for i, g in came.items() if g is not None and i not in planned])

    @property
    def unused(self) -> frozenset[int]:
        """The outputs that were planned to receive a gradient, and receive none at all."""
        if self.is_retained or not self.missing:
            return frozenset()
        return self._unused_now - self._before

    @property
    def used(self) -> frozenset[int]:
        """The outputs that have received a gradient, planned or not."""
        if not (self.missing or self.unplanned or self._before):
            return self._planned
        return (self._planned - self._unused_now) | frozenset(self.unplanned) | self._before

    @property
    def _unused_now(self) -> frozenset[int]:
        return frozenset(i for i in self.missing if i < self._outputs)
