"""Which outputs of a call have received gradients, in one backward or, retained, in several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["Reached"]


class Reached:
    """The outputs that the backwards of one call have reached.

    `backwards`: how many have begun. `is_retained`: whether the last of them keeps the graph.
    `is_apart`: whether one before it has kept none. `missing`, `unplanned`: the outputs without a
    gradient that were planned to have one in the last backward, and those with one that were not.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self.is_retained = self.is_apart = False
        self.missing: tuple[int, ...] = ()
        self.unplanned: tuple[int, ...] = ()
        self._planned: frozenset[int] = frozenset()
        self._outputs = 0
        self._before: frozenset[int] = frozenset()
        self._left: frozenset[int] | None = None  # from which another may go; None: from any

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
        several of them view. `retained`: whether it keeps the graph.
        """
        if self.backwards:
            self._before = self.used
        self.backwards += 1
        self._planned, self._outputs = planned, outputs
        self.is_retained, self.is_apart = retained, self._left is not None
        self.missing = tuple([i for i in planned if came.get(i) is None])
        self.unplanned = tuple([i for i, g in came.items() if g is not None and i not in planned])

    def leaves(self, outputs: Iterable[int]) -> None:
        """Note the outputs from which another backward may go, as this one keeps no graph."""
        left = frozenset(outputs)
        self._left = left if self._left is None else self._left & left

    def may_go_from(self, came: Mapping[int, torch.Tensor | None]) -> bool:
        """Whether a backward may go from those outputs that have gradients."""
        if self._left is None:
            return True
        return self._left.issuperset(i for i, g in came.items() if g is not None)

    @property
    def may_go_on(self) -> bool:
        """Whether another backward may come after the last."""
        return self.is_retained or bool(self._left)

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
