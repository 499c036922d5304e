"""Which outputs of a call have received gradients, in one backward or, retained, in several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

Freed: TypeAlias = frozenset[Any]
"""Operators of a backward that have read saved tensors, which are freed."""


class Reached:
    """The outputs that the backwards of one call have reached.

    `backwards`: how many have begun. `is_retained`: whether the last of them keeps the graph.
    `missing`, `unplanned`: the outputs without a gradient that were planned to have a gradient in
    the last backward, and those with a gradient that were not. `in_other_strides`: whether
    gradients had other strides than were traced. `needs_other_plan`: whether the plan of the call
    does not serve the last backward.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self.is_retained = False
        self.missing: tuple[int, ...] = ()
        self.unplanned: tuple[int, ...] = ()
        self.in_other_strides = self.needs_other_plan = False
        self._planned: frozenset[int] = frozenset()
        self._outputs = 0
        self._before: frozenset[int] = frozenset()
        self._freed: Freed = frozenset()
        self._may_follow = False  # another backward, after a backward that keeps no graph

    def begin(
        self,
        grad_outputs: Mapping[int, torch.Tensor | None],
        planned: frozenset[int],
        outputs: int,
        *,
        retained: bool,
    ) -> None:
        """Note the gradients with which a backward begins.

        `grad_outputs`: the gradients of the raw outputs. `planned`: the raw outputs that are
        planned to receive one. `outputs`: how many outputs the call has; further raw outputs are
        bases that several of them view. `retained`: whether it keeps the graph.
        """
        if self.backwards:
            self._before = self.used
        self.backwards += 1
        self._planned, self._outputs = planned, outputs
        self.is_retained = retained
        self.missing = tuple([i for i in planned if grad_outputs.get(i) is None])
        self.unplanned = tuple(
            [i for i, g in grad_outputs.items() if g is not None and i not in planned]
        )
        self.needs_other_plan = bool(self.unplanned)

    def note_other_strides(self, *, needs_other_plan: bool) -> None:
        self.in_other_strides, self.needs_other_plan = True, needs_other_plan

    def has_freed(self, reads: Callable[[], Freed]) -> bool:
        """Whether an earlier backward has freed anything that a backward reads."""
        return bool(self._freed) and not self._freed.isdisjoint(reads())

    def frees(self, reads: Callable[[], Freed], may_follow: Callable[[Freed], bool] | None) -> None:
        """Note that the last backward keeps no graph, and frees the saved tensors that it reads.

        `reads`: returns them. `may_follow`: whether from any output a backward may go that reads
        nothing freed; None: none can.
        """
        self._may_follow = False
        if self.missing and may_follow is not None:
            self._freed |= reads()
            self._may_follow = may_follow(self._freed)

    @property
    def may_go_on(self) -> bool:
        """Whether another backward may come after the last."""
        return self.is_retained or self._may_follow

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
