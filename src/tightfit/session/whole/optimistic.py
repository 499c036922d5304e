"""A plan for a budget in which no plan has room for all that is expected.

What a loss outside holds, what the optimizer's state will take, whether what is held now is let go
of before the backward: nobody knows that of a step that was not seen yet. Where no plan has room
for the worst of it, the step runs by one that counts on less. The limit holds all the same: the
allocator refuses what exceeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tightfit.errors import InfeasibleBudget
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.planners.base import Limits
from tightfit.planners.questions.infeasible import Expected
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.progress import SILENT
from tightfit.session.memory.account import Standing
from tightfit.session.memory.surroundings import Surroundings
from tightfit.session.options import Options
from tightfit.session.step.holding import holding_of
from tightfit.session.whole.specialisation import Planned, Specialisation
from tightfit.units import format_bytes

__all__ = ["LessExpected", "less_expected"]

_QUICKLY = Limits(seconds=1.0)


@dataclass(frozen=True)
class LessExpected:
    """A step with less around it than what may come.

    Parameters
    ----------
    unseen : Surroundings
        Without what nobody has seen yet: what a loss outside holds, state that is to come.
    passing : Surroundings
        As if what others hold now, and the gradients that exist, were gone before the backward.
    passing_bytes : int
        Of those.
    held_bytes : mapping of str to int
        What is expected to be held besides the step, by what holds it.
    """

    unseen: Surroundings
    passing: Surroundings
    passing_bytes: int
    held_bytes: Mapping[str, int]

    def expected(self, one: Specialisation) -> Expected:
        """Return what an error says of it."""
        known = replace(self.passing, outside_bytes=0).around(one.hoped)
        least = minimum_budget(known, self.passing.gradients, _QUICKLY, SILENT)
        return Expected(self.held_bytes, least.lower_bytes)

    def in_words(self) -> str:
        """Say what there is no room for."""
        told = [f"{format_bytes(n)} of {what}" for what, n in self.held_bytes.items() if n > 0]
        return " and ".join(told) or "what its backward was seen to hold"

    def planned(
        self, one: Specialisation, plan: Callable[[Surroundings], Planned], budget_bytes: int
    ) -> Planned | None:
        """Return a plan that leaves as much room as can be; None: no plan fits however little.

        Parameters
        ----------
        plan : callable
            Plans the step for some surroundings.
        budget_bytes : int
            What may be held at any time.
        """
        for around, more_bytes in self._by_room(one):
            least = minimum_budget(around.around(one.hoped), around.gradients, _QUICKLY, SILENT)
            if least.found_bytes > around.budget_bytes:
                continue
            one.known.remember(least.plan)
            try:
                planned = plan(around)
            except InfeasibleBudget:
                continue
            if _forward_bytes(planned) + more_bytes <= budget_bytes:
                return planned
        return None

    def _by_room(self, one: Specialisation) -> Iterator[tuple[Surroundings, int]]:
        """Yield for what to plan, and what is held in the forward besides."""
        yield self.unseen, 0
        if self.passing_bytes:
            yield self.passing, self.passing_bytes
        # as plain PyTorch runs it, where the caller lets go of what the forward returns
        least = replace(self.passing, outside_bytes=0)
        graph = least.around(one.captured)
        peak_bytes = eager_peak_bytes(graph, gradients=least.gradients)
        returned = sum(v.size_bytes for v in graph.values if v.fate == "returned")
        if least.budget_bytes < peak_bytes <= least.budget_bytes + returned:
            yield replace(least, budget_bytes=peak_bytes), self.passing_bytes


def less_expected(
    one: Specialisation, around: Surroundings, standing: Standing, options: Options
) -> LessExpected:
    """Return the surroundings of a step with less than what may come.

    Parameters
    ----------
    around : Surroundings
        With all that may come.
    standing : Standing
        What is held now.
    """
    outside_bytes = one.user_code.planned_bytes if one.user_code.is_known else 0
    coming_bytes = standing.coming_bytes
    made_bytes = coming_bytes if options.steps is not None else 0  # in this very backward
    unseen = replace(
        around,
        outside_bytes=outside_bytes,
        state_bytes=standing.state_bytes + made_bytes,
        others_bytes=standing.others_bytes,
        budget_bytes=options.planned_bytes,
        part=1.0,
    )
    passing_bytes = standing.others_bytes + standing.gradient_bytes
    passing = replace(
        unseen,
        gradients="fresh",
        gradient_bytes=0,
        others_bytes=0,
        outside_bytes=max(outside_bytes, passing_bytes),
    )
    held_bytes = {
        "what user code may hold between forward and backward": around.outside_bytes,
        "optimizer state that is to come": coming_bytes - made_bytes,
        "gradients that exist now": standing.gradient_bytes,
        "what else is held now": standing.others_bytes,
        "what others within the budget will hold": standing.others_coming_bytes,
        "what other calls may hold": options.planned_bytes - around.budget_bytes,
    }
    return LessExpected(unseen, passing, passing_bytes, held_bytes)


def _forward_bytes(planned: Planned) -> int:
    """Return the peak of a plan's forward."""
    assert planned.outcome.plan is not None
    graph = planned.graph
    return graph.constant_bytes + holding_of(graph, planned.outcome.plan).forward_bytes
