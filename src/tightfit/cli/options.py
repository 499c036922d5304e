"""Options that every command that plans shares: what a step is, and how long to search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tightfit.errors import BadInput
from tightfit.planners.base import Limits

__all__ = [
    "DEFAULT_SEARCH_OPTIONS",
    "DEFAULT_STEP_OPTIONS",
    "OptimizerName",
    "SearchOptions",
    "StepOptions",
    "chosen_limits",
]

OptimizerName = Literal["none", "sgd", "momentum", "adamw"]


@dataclass(frozen=True)
class StepOptions:
    """What belongs to a step besides its model.

    Parameters
    ----------
    optimizer
        Whose state is assumed for a model: adamw keeps two copies of the parameters.
    gradients
        Whether gradients of parameters are made anew or added to existing ones.
    costs
        Modelled costs: unit, flops, p100, v100, a100, h100 (rooflines; sizes are rounded as the
        GPU's allocator does) or cpu (this machine's roofline); for a model also measured: each
        distinct operator is timed once, by itself. By default those of a graph file, for a model
        cpu.
    """

    optimizer: OptimizerName = "adamw"
    gradients: Literal["fresh", "accumulated"] = "fresh"
    costs: str | None = None


@dataclass(frozen=True)
class SearchOptions:
    """How long a search for plans may take.

    Parameters
    ----------
    time_limit
        Seconds to plan at most, for each plan.
    iterations
        Search iterations at most; with it the result depends on the seed only.
    seed
        Seed of every random choice.
    """

    time_limit: float = Limits().seconds
    iterations: int | None = None
    seed: int = 0

    def limits(self, **others: Any) -> Limits:
        """Return the limits of the search; parameters and errors are those of `chosen_limits`."""
        return chosen_limits(self.time_limit, iterations=self.iterations, seed=self.seed, **others)


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


DEFAULT_STEP_OPTIONS = StepOptions()
DEFAULT_SEARCH_OPTIONS = SearchOptions()
