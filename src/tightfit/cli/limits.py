"""The limits of a search, as the options of a command give them."""

from __future__ import annotations

from typing import Any

from tightfit.errors import BadInput
from tightfit.planners.base import Limits

__all__ = ["chosen_limits"]


def chosen_limits(time_limit: float, **others: Any) -> Limits:
    """Return the limits of a search.

    Parameters
    ----------
    time_limit : float
        Seconds to plan at most.
    **others
        Further fields of `Limits`.

    Raises
    ------
    BadInput
        If the time limit is not positive.
    """
    if not time_limit > 0:
        raise BadInput(f"--time-limit must be a positive number of seconds, got {time_limit}")
    return Limits(seconds=time_limit, **others)
