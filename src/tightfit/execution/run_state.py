"""Where a planned call is, from its forward to the end of its last backward."""

from __future__ import annotations

from enum import Enum, auto


class RunState(Enum):
    """Where a planned call is.

    | state | meaning | comes after |
    |---|---|---|
    | NEW | no forward has run | |
    | AWAITS_BACKWARD | the forward has run | NEW |
    | IN_BACKWARD | the planned backward runs | AWAITS_BACKWARD, RETAINED |
    | REPLANNED | it runs again: outputs have gradients that were to have none | the same |
    | ONCE_MORE | it runs again: a backward was before, or its saved tensors are freed | the same |
    | DIFFERENTIATED | it runs again under autograd: its gradients have a history | the same |
    | RETAINED | a backward has ended, and another may come | a backward |
    | DONE | the last backward has ended | a backward |
    | REFUSED | a backward cannot be run, and an error says so | AWAITS_BACKWARD, RETAINED |
    | FAILED | an error has ended a backward | any |
    """

    NEW = auto()
    AWAITS_BACKWARD = auto()
    IN_BACKWARD = auto()
    REPLANNED = auto()
    ONCE_MORE = auto()
    DIFFERENTIATED = auto()
    RETAINED = auto()
    DONE = auto()
    REFUSED = auto()
    FAILED = auto()

    @property
    def may_begin_backward(self) -> bool:
        return self in (RunState.AWAITS_BACKWARD, RunState.RETAINED)

    @property
    def is_open(self) -> bool:
        """Whether the planned backward is to come, or running."""
        return self in (RunState.AWAITS_BACKWARD, RunState.IN_BACKWARD)
