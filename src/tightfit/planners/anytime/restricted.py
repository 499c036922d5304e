"""K-cut programs that recompute only ops nearby: seeds for large graphs, no bounds.

In every window but the last an op may be computed again only if the window reads it directly, or
reads an op shortly after it (docs/search.md, "Restricted programs"). The program shrinks to the
usual form of a good plan for a deep network, and more cuts become affordable.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tightfit.planners.anytime.bound import CutLoop
from tightfit.planners.anytime.kcut.complete import complete
from tightfit.planners.anytime.kcut.program import cut_program
from tightfit.planners.anytime.pool import PooledSchedule
from tightfit.planners.anytime.relaxation import RelaxedProblem

_LEAST_OPS = 600
_MOST_EXCESS = 1.3  # of the budget, in the completed one-cut program
_MOST_CUTS = 6
_NEW_CUTS = 2
_APART = 0.004  # of the ops between new cuts
_FAR_SHARE = 0.02  # of the direct reads that may be far before the rest
_GAP = 0.1  # percent of the baseline
_PROGRAM_S = 4.0


def worth_restricting(loop: CutLoop) -> bool:
    """Whether a graph is large and its completed one-cut program nearly fits."""
    most = _MOST_EXCESS * loop.problem.budget_bytes
    return loop.relaxed.ops >= _LEAST_OPS and loop.schedule.peak() <= most


def near_ops(relaxed: RelaxedProblem, cuts: Sequence[int]) -> list[set[int] | None]:
    """Return, per window, the ops that may be computed again in it (None: all)."""
    margin = max(12, relaxed.ops // 50)
    allowed: list[set[int] | None] = []
    for first, end in pairwise(cuts):
        direct = sorted(
            producer
            for op in range(first, end)
            for producer in (relaxed.problem.producers[v] for v in relaxed.first_reads[op])
            if producer < first
        )
        if not direct:
            allowed.append(set())
            continue
        nearest = max(0, direct[int(_FAR_SHARE * len(direct))] - margin)
        allowed.append({*direct, *range(nearest, first)})
    return [*allowed, None]


class RestrictedLoop(CutLoop):
    """A cut loop over restricted programs: it feeds the pool with plans and seeds only."""

    def round(self, seconds: float, nodes: int | None = None, *, in_child: bool = False) -> None:
        """Solve the restricted program, complete it, and add the fullest stages as cuts."""
        budget = self.problem.budget_bytes
        allowed = near_ops(self.relaxed, self.cuts)
        model = cut_program(self.relaxed, budget, self.cuts, allowed=allowed)
        answer = self.solve(model, min(seconds, _PROGRAM_S), nodes, _GAP, in_child=in_child)
        if answer.values is None:
            self.finished = True
            return
        complete(model, answer, self.schedule)
        found = PooledSchedule.of(self.schedule)
        self.pool.add(found)
        self.pool.add_seed(found)
        new = self._fullest_stages()
        self.finished = not new or len(self.cuts) >= _MOST_CUTS
        self.cuts = tuple(sorted({*self.cuts, *new}))

    def _fullest_stages(self) -> list[int]:
        """The stages that exceed the budget most, apart from each other and from the cuts."""
        peaks, budget = self.schedule.peaks(), self.problem.budget_bytes
        apart = max(2, int(_APART * self.relaxed.ops))
        chosen: list[int] = []
        for stage in sorted(range(len(peaks)), key=lambda t: -peaks[t]):
            if peaks[stage] <= budget or len(chosen) == _NEW_CUTS:
                break
            far = all(abs(stage - other) >= apart for other in chosen)
            if far and stage not in self.cuts:
                chosen.append(stage)
        return chosen
