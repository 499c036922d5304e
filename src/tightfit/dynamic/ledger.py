"""The clock of a region, counts of its events, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from tightfit.errors import InfeasibleBudget
from tightfit.units import format_bytes


@dataclass(frozen=True)
class OnlineReport:
    """The counters of a region so far.

    Parameters
    ----------
    core : str
        The core that intercepts operators: ``"C++"``, or ``"Python"`` and why.
    budget_bytes, peak_bytes : int
        The budget, and the most that the allocator had allocated at once.
    operators : int
        That ran for the first time; views are not counted.
    evictions : int
        Storages whose memory was taken.
    rematerialisations : int
        Operators that ran again.
    compute_s, again_s : float
        Seconds in operators that ran first, and again.
    scoring_s, searching_s : float
        Seconds in which scores were computed, and in the rest of the search for contents to evict.
    rest_s : float
        Seconds of everything else the runtime does.
    """

    core: str
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
            f"{self.rematerialisations} rematerialisations; core: {self.core}",
            *(f"{s:9.3f} s  {100 * s / (total_s or 1):5.1f} %  {name}" for name, s in parts),
        ]
        return "\n".join(lines)


class Counts(NamedTuple):
    """Counts of the core in C++ since it was asked last, in its order."""

    operators: int
    evictions: int
    again: int
    all_ns: int
    first_ns: int
    again_ns: int
    scoring_ns: int
    search_ns: int


class Ledger:
    """The clock, which runs by costs and not by time, so that every run decides alike.

    `most_again`: how often a step's own cost may be spent on computing again.
    """

    def __init__(self, budget_bytes: int, most_again: float) -> None:
        self.clock = 1
        self.budget_bytes = budget_bytes
        self.operators = self.evictions = 0
        self._again = 0
        self._all_ns = self._first_ns = self._again_ns = 0
        self._scoring_ns = self._search_ns = 0
        self.most_again = most_again
        self._step_cost = self._again_cost = self._last_step_cost = 0

    def moment(self) -> int:
        """Return the time now, less the time of searches."""
        return perf_counter_ns() - self._search_ns

    def ran_first(self, cost: int) -> None:
        """Count an operator of the program that has run."""
        self.operators += 1
        self.clock += cost
        self._step_cost += cost

    def ran_again(self, cost: int, started: int) -> None:
        """Count an operator that has run again, since a `moment`."""
        self._again += 1
        self._again_ns += perf_counter_ns() - self._search_ns - started
        self.clock += cost
        self._again_cost += cost

    def evicted(self) -> None:
        """Count a storage whose memory was taken."""
        self.evictions += 1

    def stop_if_thrashing(self) -> None:
        """Raise if a step has cost its limit.

        Raises `InfeasibleBudget` if computing again has cost more than the limit allows.
        """
        own_cost = max(self._step_cost, self._last_step_cost)
        if self._again_cost > self.most_again * own_cost:
            raise self.thrashing(self._again_cost / own_cost)

    def thrashing(self, times: float) -> InfeasibleBudget:
        """Return the error of a step whose cost was spent so many times on computing again."""
        return InfeasibleBudget(
            f"the budget of {format_bytes(self.budget_bytes)} makes the program thrash: "
            f"computing again has cost {times:.1f} times as much as the step itself, the limit is "
            f"{self.most_again:g}. Raise the budget, make the batch smaller, or raise most_again=",
            budget_bytes=self.budget_bytes,
        )

    def end_step(self) -> None:
        self._last_step_cost = self._step_cost
        self._step_cost = self._again_cost = 0

    def computed_since(self, started: int) -> None:
        """Count the time since a `moment`, in which a kernel ran for the first time."""
        self._first_ns += perf_counter_ns() - self._search_ns - started

    def inside_since(self, started_ns: int) -> None:
        """Count the time in which the runtime was at work, kernels included."""
        self._all_ns += perf_counter_ns() - started_ns

    def searched_since(self, started_ns: int, scoring_ns: int) -> None:
        """Count a search for contents to evict; a part of it was computing scores."""
        self._search_ns += perf_counter_ns() - started_ns
        self._scoring_ns += scoring_ns

    def add(self, counts: Counts) -> None:
        self.operators += counts.operators
        self.evictions += counts.evictions
        self._again += counts.again
        self._all_ns += counts.all_ns
        self._first_ns += counts.first_ns
        self._again_ns += counts.again_ns
        self._scoring_ns += counts.scoring_ns
        self._search_ns += counts.search_ns

    def report(self, peak_bytes: int, core: str) -> OnlineReport:
        inside_ns = self._first_ns + self._again_ns + self._search_ns
        return OnlineReport(
            core=core,
            budget_bytes=self.budget_bytes,
            peak_bytes=peak_bytes,
            operators=self.operators,
            evictions=self.evictions,
            rematerialisations=self._again,
            compute_s=self._first_ns / 1e9,
            again_s=self._again_ns / 1e9,
            scoring_s=self._scoring_ns / 1e9,
            searching_s=(self._search_ns - self._scoring_ns) / 1e9,
            rest_s=max(0, self._all_ns - inside_ns) / 1e9,
        )
