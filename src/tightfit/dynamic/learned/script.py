"""A plan as what to do around each operator of the program: compute again, let go, hold on to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tightfit.dynamic.learned.graph import RecordedGraph
from tightfit.dynamic.learned.trace import OVERWRITTEN, Trace
from tightfit.errors import InvalidPlan
from tightfit.plan.plan import Compute, Free, Plan

__all__ = ["Action", "Again", "KeepsOverwritten", "LetGo", "Script", "script_of"]


class KeepsOverwritten(Exception):
    """A plan keeps a content after an operator of the program has written over it."""


@dataclass(frozen=True)
class Again:
    """Run the operator again that makes these contents, all of one operator."""

    contents: tuple[int, ...]


@dataclass(frozen=True)
class LetGo:
    """A content's memory may go; is it needed again?"""

    content: int
    returns: bool


Action: TypeAlias = Again | LetGo


@dataclass(frozen=True)
class Script:
    """What a plan asks for, by the position of operators.

    Parameters
    ----------
    before : tuple of tuple of Action
        Per operator, when it is known that it runs next.
    after : tuple of tuple of Action
        Per operator, before anything happens after it.
    holds : tuple of tuple of int
        Per operator those of its contents that the plan needs longer than the program holds them.
    again : int
        How many operators run again.
    """

    before: tuple[tuple[Action, ...], ...]
    after: tuple[tuple[Action, ...], ...]
    holds: tuple[tuple[int, ...], ...]
    again: int

    def gone(self, position: int) -> dict[int, bool]:
        """Return what the plan has let go of before an operator, and whether it comes back."""
        found: dict[int, bool] = {}
        for n in range(position):
            for action in (*self.before[n], *self.after[n]):
                if isinstance(action, LetGo):
                    found[action.content] = action.returns
                else:
                    for content in action.contents:
                        found.pop(content, None)
        return found


def script_of(trace: Trace, recorded: RecordedGraph, plan: Plan) -> Script:
    """Return a plan for a recorded step as what to do around its operators.

    Raises
    ------
    InvalidPlan
        If it runs operators in another order than the program.
    KeepsOverwritten
        If it needs what the program has written over.
    """
    return _Writer(trace, recorded, plan).script()


class _Writer:
    """Walks a plan from operator to operator.

    Parameters
    ----------
    trace, recorded, plan
        As for `script_of`.
    """

    def __init__(self, trace: Trace, recorded: RecordedGraph, plan: Plan) -> None:
        self.trace = trace
        self.recorded = recorded
        self.steps = plan.instructions
        count = len(trace.asked)
        self.before: list[list[Action]] = [[] for _ in range(count)]
        self.after: list[list[Action]] = [[] for _ in range(count)]
        self.holds: list[list[int]] = [[] for _ in range(count)]
        self.again = 0
        self.position = -1  # of the last operator that has run first
        self.waiting: list[Action] = []
        self.came_back: set[int] = set()
        self.last_again = self._last_again()
        self.maker = {m.number: n for n, each in enumerate(trace.made) for m in each}
        self.overwriter = {m.over: n for n, each in enumerate(trace.made) for m in each}

    def script(self) -> Script:
        """Return it."""
        seen: set[int] = set()
        for index, step in enumerate(self.steps):
            if isinstance(step, Compute):
                if step.op in seen:
                    self._again(index, step)
                else:
                    seen.add(step.op)
                    self._first(self.recorded.operators[step.op])
            elif isinstance(step, Free):
                self._free(index, step.value)
        if self.position != len(self.trace.asked) - 1:
            raise InvalidPlan("a plan for a recorded step ends before the step does")
        return Script(
            before=tuple(map(tuple, self.before)),
            after=tuple(map(tuple, self.after)),
            holds=tuple(map(tuple, self.holds)),
            again=self.again,
        )

    def _first(self, operator: int) -> None:
        if operator < 0:  # what comes before it has to be done as soon as possible
            if self.position >= 0:
                self.after[self.position] += self.waiting
                self.waiting = []
            return
        if operator != self.position + 1:
            raise InvalidPlan("a plan for a recorded step runs it in another order")
        self.position = operator
        self.before[operator] += self.waiting
        self.waiting = []

    def _again(self, index: int, step: Compute) -> None:
        op = self.recorded.graph.ops[step.op]
        made = [v for v in op.alternatives[step.alternative].writes if self._lasts(index, v)]
        contents = tuple(self.recorded.contents[value] for value in made)
        if contents:
            self.again += 1
            self.came_back.update(contents)
            self.waiting.append(Again(contents))

    def _lasts(self, index: int, value: int) -> bool:
        """Whether a value outlives the computation that makes it again."""
        following = index + 1
        while following < len(self.steps):
            step = self.steps[following]
            if not isinstance(step, Free):
                return True
            if step.value == value:
                return False
            following += 1
        return True

    def _free(self, index: int, value: int) -> None:
        content = self.recorded.contents[value]
        if content < 0:
            return
        end = self.trace.ends[content]
        needed_until = self.position + any(isinstance(action, Again) for action in self.waiting)
        is_first = content not in self.came_back
        if is_first and end == OVERWRITTEN and needed_until > self.overwriter[content]:
            raise KeepsOverwritten
        if is_first and 0 <= end <= needed_until:
            self.holds[self.maker[content]].append(content)
        self.waiting.append(LetGo(content, self.last_again.get(value, -1) > index))

    def _last_again(self) -> dict[int, int]:
        """Per value the last instruction that makes it again."""
        found: dict[int, int] = {}
        seen: set[int] = set()
        for index, step in enumerate(self.steps):
            if isinstance(step, Compute):
                if step.op in seen:
                    op = self.recorded.graph.ops[step.op]
                    found |= dict.fromkeys(op.alternatives[step.alternative].writes, index)
                seen.add(step.op)
        return found
