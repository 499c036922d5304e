"""What user code holds between a planned forward and its backward."""

from __future__ import annotations

__all__ = ["UserCode"]


class UserCode:
    """What user code holds between forward and backward: assumed at first, then measured.

    Parameters
    ----------
    assumed_bytes : int
        As long as nobody has seen it.

    Attributes
    ----------
    planned_bytes : int
        What plans leave room for.
    seen_bytes : int or None
        What it was seen to hold.
    """

    def __init__(self, assumed_bytes: int) -> None:
        self.planned_bytes = assumed_bytes
        self.seen_bytes: int | None = None
        self._looks_again, self._first_grew = True, False

    @property
    def is_known(self) -> bool:
        """Whether it was seen."""
        return self.seen_bytes is not None

    @property
    def may_be_seen(self) -> bool:
        """Whether it is still learned: from two steps."""
        return not self.is_known or self._looks_again

    def saw(self, outside_bytes: int, *, has_grown: bool) -> int:
        """Note what it held in the last step; plans that are there stay in use.

        Parameters
        ----------
        outside_bytes : int
            What it held.
        has_grown : bool
            Whether the last step has left more behind than was there before, as the first one
            does of an optimizer's state: a second step shows what is held without that.

        Returns
        -------
        int
            What to plan for.
        """
        before = self.seen_bytes
        if before is not None:
            self._looks_again = False
            outside_bytes = outside_bytes if self._first_grew else max(before, outside_bytes)
        self._first_grew = has_grown
        self.seen_bytes = outside_bytes
        return outside_bytes

    def plan_for(self, outside_bytes: int) -> None:
        """Make the next plan for what it was seen to hold."""
        self.planned_bytes = outside_bytes
