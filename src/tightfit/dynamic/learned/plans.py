"""What is known of the steps a program runs: their traces, their plans, searches under way."""

from __future__ import annotations

from tightfit.dynamic.learned.graph import GUIDED_S, graph_of
from tightfit.dynamic.learned.script import KeepsOverwritten, Script, script_of
from tightfit.dynamic.learned.trace import Asked, Made, Met, Signature, Trace
from tightfit.plan.plan import Outcome
from tightfit.planners.apart import plan_apart
from tightfit.planners.background import Search
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import DEFAULT
from tightfit.progress import Progress

__all__ = ["KnownStep", "KnownSteps"]

_MOST_STEPS = 8
_MOST_PLANS = 4  # of one step: what was not foreseen is left free in the next one
_CLOSE = 0.005  # overhead left to gain at which a search ends
_WORTHWHILE = 1.0  # of what eviction has spent; a plan is followed if it costs less


class KnownStep:
    """A step that has been recorded.

    Parameters
    ----------
    trace : Trace
        As it ran.
    budget_bytes : int
        For all of it.
    seconds : float
        For a search.
    """

    def __init__(self, trace: Trace, budget_bytes: int, seconds: float) -> None:
        self.trace = trace
        self.script: Script | None = None
        self._outcome: Outcome | None = None
        self._budget_bytes = budget_bytes
        self._seconds = seconds
        self._search: Search | None = None
        self._found: Script | None = None
        self._plans = 0

    def promise(self) -> tuple[float, float]:
        """Return what its plan costs and what any plan costs at least, as fractions of the step."""
        assert self._outcome is not None
        return self._outcome.overhead, self._outcome.bound

    def ran_online(self, trace: Trace) -> None:
        """It has run again by eviction; a plan is sought once that has computed something again."""
        self.trace = self.trace.merged(trace)
        if trace.again and self._plans == 0:
            self._start()

    def ran_planned(self, again_ns: int, lacking_bytes: int) -> None:
        """It has run by its plan, beside which so many bytes were lacking.

        A plan that does not keep what it promises is replaced by one that leaves more room, or
        given up if computing again cost more than eviction had spent.
        """
        if self.script is None or not lacking_bytes:
            return
        if again_ns > self.trace.again_ns:
            self.script = None
        if self._plans < _MOST_PLANS and self._search is None:
            self._budget_bytes -= lacking_bytes
            self._start()

    def take_up(self) -> None:
        """Follow from now on what a search has found, if that is better than eviction."""
        if self._search is None or not self._search.is_done:
            return
        outcome, self._search = self._search.result(), None
        if outcome is None or outcome.plan is None or self._found is None:
            return
        if outcome.overhead * self._own_s >= _WORTHWHILE * self._eviction_s:
            return
        self.script, self._outcome = self._found, outcome

    def wait(self, seconds: float | None) -> None:
        """Wait until nothing is being sought."""
        if self._search is not None:
            self._search.wait(seconds)

    def forget(self) -> None:
        """Nobody wants a plan any more."""
        if self._search is not None:
            self._search.cancel()
            self._search = None

    @property
    def _own_s(self) -> float:
        """Seconds of the step, each operator once."""
        return sum(self.trace.cost_ns) * 1e-9 + len(self.trace.asked) * GUIDED_S

    @property
    def _eviction_s(self) -> float:
        """Seconds that eviction has spent on computing again."""
        return self.trace.again_ns * 1e-9 + self.trace.again * GUIDED_S

    def _start(self) -> None:
        self._plans += 1
        trace, budget_bytes, seconds = self.trace, self._budget_bytes, self._seconds

        def plan(progress: Progress) -> Outcome:
            for in_place in (False, True):
                outcome, self._found = _planned(trace, budget_bytes, seconds, in_place, progress)
                if outcome.plan is None or self._found is not None:
                    break
            return outcome

        self._search = Search(plan)


def _planned(
    trace: Trace, budget_bytes: int, seconds: float, in_place: bool, progress: Progress
) -> tuple[Outcome, Script | None]:
    """Return the default planner's outcome, whose plan is verified, and what to do by it.

    There is nothing to do by a plan that keeps what the program writes over.
    """
    recorded = graph_of(trace, in_place=in_place)
    task = Task(graph=recorded.graph, budget_bytes=budget_bytes, keeps_order=True)
    limits = Limits(seconds=seconds / 2, gap=_CLOSE, workers=1)
    outcome = plan_apart(DEFAULT, task, limits, progress)
    if outcome.plan is None:
        return outcome, None
    try:
        return outcome, script_of(trace, recorded, outcome.plan)
    except KeepsOverwritten:
        return outcome, None


class KnownSteps:
    """The steps that were recorded last.

    Parameters
    ----------
    budget_bytes : int
        For everything.
    seconds : float
        For a search.
    """

    def __init__(self, budget_bytes: int, seconds: float) -> None:
        self._budget_bytes = budget_bytes
        self._seconds = seconds
        self._steps: dict[Signature, KnownStep] = {}
        self._following: dict[KnownStep, KnownStep] = {}
        self._last: KnownStep | None = None

    def ran(self, trace: Trace) -> bool:
        """A step has run by eviction; return whether it was known."""
        known = self._steps.pop(trace.signature, None)
        is_known = known is not None
        if known is None:
            known = KnownStep(trace, self._budget_bytes, self._seconds)
        else:
            known.ran_online(trace)
        self._steps[trace.signature] = known
        self.came(known)
        for signature in [*self._steps][:-_MOST_STEPS]:
            forgotten = self._steps.pop(signature)
            forgotten.forget()
            self._following.pop(forgotten, None)
        return is_known

    def came(self, known: KnownStep) -> None:
        """A step has run, one way or other: it may follow the one before again."""
        if self._last is not None:
            self._following[self._last] = known
        self._last = known

    def take_up(self) -> None:
        """Between two steps: take up what searches have found."""
        for known in self._steps.values():
            known.take_up()

    def expected(self) -> KnownStep | None:
        """The step that comes next, if it has a plan: what followed the last one before."""
        known = None if self._last is None else self._following.get(self._last)
        return known if known is not None and known.script is not None else None

    def beginning(
        self, asked: list[Asked], made: list[tuple[Made, ...]], met: list[Met]
    ) -> KnownStep | None:
        """A step with a plan that begins as one has; the latest."""
        for known in reversed(self._steps.values()):
            if known.script is not None and known.trace.begins(asked, made, met):
                return known
        return None

    def wait(self, seconds: float | None) -> None:
        """Wait until nothing is being sought."""
        for known in self._steps.values():
            known.wait(seconds)

    def forget(self) -> None:
        """Forget them all."""
        for known in self._steps.values():
            known.forget()
        self._steps.clear()
        self._following.clear()
        self._last = None
