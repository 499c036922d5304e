"""How much of its limits a search has used: seconds, or a count of iterations."""

from __future__ import annotations

import time

import msgspec

from tightfit.planners.base import Limits

_JOB_ITERATIONS = 50  # at least, per piece of search under an iteration limit
_JOBS = 40  # pieces of search that the limit is divided into


class Clock:
    """The limits of a search, and what is left of time or iterations.

    `limits`: with an iteration limit nothing depends on the machine's speed. `started`:
    `time.perf_counter` when it began.
    """

    def __init__(self, limits: Limits, started: float) -> None:
        self.limits = limits
        self.started = started
        self.iterations_left = limits.iterations

    @property
    def counts_iterations(self) -> bool:
        """Whether iterations are the limit, and not seconds."""
        return self.limits.iterations is not None

    @property
    def deadline(self) -> float:
        """The end, of `time.perf_counter`."""
        return self.started + self.limits.seconds

    def restart(self, seconds: float) -> None:
        """Give these seconds from now on."""
        self.started = time.perf_counter()
        self.limits = msgspec.structs.replace(self.limits, seconds=seconds)

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def left(self) -> float:
        """Seconds left; under an iteration limit the same share of them."""
        if self.iterations_left is not None and self.limits.iterations:
            return self.limits.seconds * self.iterations_left / self.limits.iterations
        return self.limits.seconds - self.elapsed()

    def take_iterations(self) -> int:
        """Take the iterations of one piece of search; -1 if there is no limit to take from."""
        if self.iterations_left is None:
            return -1
        most = max(_JOB_ITERATIONS, (self.limits.iterations or 0) // _JOBS)
        return self.take(most)

    def take_share(self, share: float) -> int | None:
        """Take a share of the iterations that are left; None where they are no limit."""
        if self.iterations_left is None:
            return None
        return self.take(round(share * self.iterations_left))

    def take(self, most: int) -> int:
        """Take so many iterations, or the rest; none where they are no limit."""
        if self.iterations_left is None:
            return 0
        taken = min(most, self.iterations_left)
        self.iterations_left -= taken
        return taken
