"""The budget of a question about a model: bytes, the least one, or a share of its activations."""

from __future__ import annotations

from tightfit.errors import BadInput
from tightfit.graph.liveness import refuse_ratio
from tightfit.units import parse_bytes

MINIMUM = "minimum"


def requested_bytes(budget: int | str | None, budget_ratio: float | None) -> int | None:
    """Return the bytes asked for; None if they depend on the step: the least, or a ratio.

    Raises `BadInput` unless one of the two is given, and can be used.
    """
    if (budget is None) == (budget_ratio is None):
        raise BadInput(
            "give either a budget, such as '8GiB' or 'minimum', or a budget ratio, such as 0.5"
        )
    if budget_ratio is not None:
        refuse_ratio(budget_ratio)
    return None if budget is None or budget == MINIMUM else parse_bytes(budget)
