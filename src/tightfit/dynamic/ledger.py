"""The clock of a region, what happened in it, and where its time went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from time import perf_counter_ns

from tightfit.errors import InfeasibleBudget
from tightfit.units import format_bytes

__all__ = ["Ledger", "OnlineReport"]


@dataclass(frozen=True)
class OnlineReport:
    """What happened in a region so far.

    Parameters
    ----------
    budget_bytes, peak_bytes : int
        What was given, and the most that the allocator had given out at once.
    operators : int
        That ran for the first time; views are not counted.
    evictions : int
        Storages whose memory was taken.
    rematerialisations : int
        Operators that ran again.
    compute_s, again_s : float
        Seconds in operators that ran first, and again.
    scoring_s, searching_s : float
        Seconds in which scores were computed, and in the rest of the search for what to evict.
    rest_s : float
        Seconds of everything else the runtime does.
    """

    budget_bytes: int
    peak_bytes: int
    operators: int
    evictions: int
    rematerialisations: int
    compute_s: float
    again_s: float
    scoring_s: float
    searching_s: float
    rest_s: float

    def __str__(self) -> str:
        total_s = self.compute_s + self.again_s + self.scoring_s + self.searching_s + self.rest_s
        parts = (
            ("computing", self.compute_s),
            ("computing again", self.again_s),
            ("scoring", self.scoring_s),
            ("searching and evicting", self.searching_s),
            ("keeping the record", self.rest_s),
        )
        lines = [
            f"budget {format_bytes(self.budget_bytes)}, peak {format_bytes(self.peak_bytes)}",
            f"{self.operators} operators, {self.evictions} evictions, "
            f"{self.rematerialisations} rematerialisations",
            *(f"{s:9.3f} s  {100 * s / (total_s or 1):5.1f} %  {name}" for name, s in parts),
        ]
        return "\n".join(lines)


class Ledger:
    """The clock, which runs by costs and not by time, so that every run decides alike.

    Parameters
    ----------
    budget_bytes : int
        What was given.
    most_again : float
        How often a step's own cost may be spent on computing again.
    """

    def __init__(self, budget_bytes: int, most_again: float) -> None:
        self.clock = 1
        self.budget_bytes = budget_bytes
        self.counts: Counter[str] = Counter()
        self.spent_ns: Counter[str] = Counter()
        self._most_again = most_again
        self._step_cost = self._again_cost = self._last_step_cost = 0

    @property
    def operators(self) -> int:
        return self.counts["operators"]

    def ran_first(self, cost: int) -> None:
        """An operator of the program has run."""
        self.counts["operators"] += 1
        self.clock += cost
        self._step_cost += cost

    def ran_again(self, cost: int, spent_ns: int) -> None:
        """An operator has run again."""
        self.counts["again"] += 1
        self.spent_ns["again"] += spent_ns
        self.clock += cost
        self._again_cost += cost

    def stop_if_thrashing(self) -> None:
        """Raise if a step has cost its limit.

        Raises
        ------
        InfeasibleBudget
            If computing again has cost more than the limit allows.
        """
        own_cost = max(self._step_cost, self._last_step_cost)
        if self._again_cost > self._most_again * own_cost:
            raise InfeasibleBudget(
                f"the budget of {format_bytes(self.budget_bytes)} makes the program thrash: "
                f"computing again has cost {self._again_cost / own_cost:.1f} times as much as the "
                f"step itself, the limit is {self._most_again:g}. Raise the budget, make the batch "
                "smaller, or raise most_again=",
                budget_bytes=self.budget_bytes,
            )

    def end_step(self) -> None:
        """A training step is over."""
        self._last_step_cost = self._step_cost
        self._step_cost = self._again_cost = 0

    def spend(self, on: str, since_ns: int) -> None:
        """Count the time since a moment."""
        self.spent_ns[on] += perf_counter_ns() - since_ns

    def report(self, peak_bytes: int) -> OnlineReport:
        """Return what happened so far."""
        spent_s = {name: ns / 1e9 for name, ns in self.spent_ns.items()}
        compute_s, again_s = spent_s.get("first", 0.0), spent_s.get("again", 0.0)
        scoring_s, search_s = spent_s.get("scoring", 0.0), spent_s.get("search", 0.0)
        inside_s = compute_s + again_s + search_s
        return OnlineReport(
            budget_bytes=self.budget_bytes,
            peak_bytes=peak_bytes,
            operators=self.counts["operators"],
            evictions=self.counts["evictions"],
            rematerialisations=self.counts["again"],
            compute_s=compute_s,
            again_s=again_s,
            scoring_s=scoring_s,
            searching_s=search_s - scoring_s,
            rest_s=max(0.0, spent_s.get("all", 0.0) - inside_s),
        )
