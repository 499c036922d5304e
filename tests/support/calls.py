"""Calls as those know them that learn from calls: which wait, and what a backward has reached."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from tightfit.execution.reached import Reached


@dataclass(eq=False)
class Call:
    """A call that awaits its backward."""

    is_open: bool = True
    is_freed: bool = False


def reached(came: Collection[int], planned: Collection[int] = (0, 1), outputs: int = 2) -> Reached:
    """Return what a backward has reached in which gradients of some outputs came.

    `planned`: the outputs that the call was planned to have gradients of.
    """
    made = Reached()
    gradients = {i: torch.ones(()) if i in came else None for i in range(outputs)}
    made.begin(gradients, frozenset(planned), outputs, retained=False)
    return made
