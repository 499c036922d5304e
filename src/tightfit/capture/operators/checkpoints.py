"""Checkpoints (`torch.utils.checkpoint`) in a trace: their operators, without recomputation.

Which results are kept and which are computed again is the plan's to decide. The results are the
same either way, but for state that a region changes when it runs again.
"""

from __future__ import annotations

import enum


class Checkpoints(enum.Enum):
    """The checkpoints of a forward, whose regions plain PyTorch runs again in backward."""

    NONE = "none"
    SAME_DRAWS = "each draws the random numbers that it drew at first"
    OTHER_DRAWS = "one draws other random numbers"


class SeenCheckpoints:
    """The checkpoints that a traced forward goes through."""

    def __init__(self) -> None:
        self.found = Checkpoints.NONE

    def note(self, preserve: bool) -> None:
        """Note a checkpoint, and whether it keeps the state of random generators."""
        if not preserve:
            self.found = Checkpoints.OTHER_DRAWS
        elif self.found is Checkpoints.NONE:
            self.found = Checkpoints.SAME_DRAWS
