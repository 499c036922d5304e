"""The part of a budget that plans leave for fragmentation: learned from steps.

A caching allocator takes more from a device than it gives out: blocks are cached, and gaps between
them may be too small for a request. Where the device's limit is reached it gives back cached blocks
and tries again, which takes time. Its loss shows at the moment when it first does that, or when it
last took more: the bytes that were not allocated then.
"""

from __future__ import annotations

from tightfit.allocator.caching import AllocatorState

_MOST_ROUNDS = 3
_SPARE = 1 / 64  # of the budget: left in addition, as the loss varies


class AllocatorStep:
    """The state of an allocator after one step.

    `reserved_bytes`: the largest number of reserved bytes that was seen. `retries`: how often it
    had to give back cached blocks.
    """

    def __init__(self, begin: AllocatorState) -> None:
        self.reserved_bytes = begin.reserved_bytes
        self.retries = 0
        self._counted = begin.retries
        self._last: AllocatorState | None = None
        self._lost = 0.0

    @property
    def lost_share(self) -> float:
        """The share of reserved bytes that was not allocated when that mattered."""
        return self._lost

    def note(self, now: AllocatorState) -> None:
        """Note the allocator's state during the step; best before each large request."""
        if self.retries == 0:
            if now.retries > self._counted:
                self._note_loss(self._last)
            elif now.reserved_bytes > self.reserved_bytes:
                self._note_loss(now)
        self.end(now)
        self._last = now

    def end(self, now: AllocatorState) -> None:
        self.retries += max(0, now.retries - self._counted)
        self._counted = now.retries
        self.reserved_bytes = max(self.reserved_bytes, now.reserved_bytes)

    def _note_loss(self, at: AllocatorState | None) -> None:
        if at is not None and at.reserved_bytes > 0:
            self._lost = 1 - at.allocated_bytes / at.reserved_bytes


class Fragmentation:
    """The bytes that plans are to leave, from round to round: each round is a new plan.

    `left_bytes`: bytes that plans leave now. `rounds`: how often that has changed.
    """

    def __init__(self, first_bytes: int = 0) -> None:
        self.left_bytes = self._first_bytes = first_bytes
        self.rounds = 0
        self._enough_bytes: int | None = None  # left by a plan that ran without a retry

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.rounds >= _MOST_ROUNDS

    def learn(self, step: AllocatorStep, limit_bytes: int, *, is_whole: bool) -> bool:
        """Learn from a step whose plan leaves as much; return whether to make another plan.

        `limit_bytes`: bytes it may reserve. `is_whole`: whether the step ran the plan that was made
        for this; if not, less is not tried.
        """
        if self.is_over:
            return False
        spare_bytes = round(_SPARE * limit_bytes)
        unused_bytes = limit_bytes - step.reserved_bytes
        if step.retries or unused_bytes < 0:
            if self._enough_bytes is not None:
                return self._leave(self._enough_bytes)
            lost_bytes = round(step.lost_share * limit_bytes)
            if lost_bytes <= self.left_bytes:  # or it was not seen
                more_bytes = self.left_bytes if lost_bytes == 0 else 0
                lost_bytes = self.left_bytes + max(more_bytes, 3 * spare_bytes)
            return self._leave(lost_bytes + spare_bytes)
        is_much = self.left_bytes > self._first_bytes and unused_bytes > 4 * spare_bytes
        if is_whole and is_much and self.rounds < _MOST_ROUNDS - 1 and self._enough_bytes is None:
            self._enough_bytes = self.left_bytes
            return self._leave(max(0, self.left_bytes - unused_bytes + 2 * spare_bytes))
        return False

    def leave_less(self, lacking_bytes: int) -> None:
        """Leave less, for good: no plan leaves as much.

        `lacking_bytes`: bytes by which plans leave too much, as far as that is known.
        """
        is_known = 0 < lacking_bytes < self.left_bytes and not self.is_over
        self.left_bytes -= lacking_bytes if is_known else self.left_bytes
        self.rounds = _MOST_ROUNDS

    def _leave(self, left_bytes: int) -> bool:
        if left_bytes == self.left_bytes:
            return False
        self.left_bytes = left_bytes
        self.rounds += 1
        return True
