"""The seam between the runtime and what was learned: told of operators, says what may go.

The runtime says what is about to run and what has run; the guide brings back before that what
the plan wants back, and is asked first when memory is lacking. It is asleep, and costs nothing,
while nothing has to be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tightfit.dynamic.history import Content
from tightfit.dynamic.learned.follower import Follower
from tightfit.dynamic.learned.plans import KnownStep, KnownSteps
from tightfit.dynamic.learned.recording import Recording
from tightfit.dynamic.learned.running import RunningStep
from tightfit.dynamic.learned.trace import Asked, Trace
from tightfit.dynamic.ledger import Learned, Ledger
from tightfit.dynamic.noted import Noted
from tightfit.dynamic.pool import Pool
from tightfit.dynamic.repeater import Repeater
from tightfit.dynamic.room import Room, is_refusal

__all__ = ["Guide"]

_PATIENCE = 8
"""Steps that are recorded in vain before fewer are, and that are after one has left its plan."""

_LONGEST_SLEEP = 64  # steps


class Guide:
    """Learns from steps, and follows plans in them.

    Parameters
    ----------
    room, pool, repeater, ledger
        Of the runtime.
    seconds : float
        For the search of a plan, in the background; 0: nothing is learned.
    """

    def __init__(
        self, room: Room, pool: Pool, repeater: Repeater, ledger: Ledger, seconds: float
    ) -> None:
        self._parts = room, pool, repeater, ledger
        self._steps = KnownSteps(room.limit_bytes, seconds) if seconds > 0 else None
        self._step: RunningStep | None = None
        self._recording: Recording | None = None
        self._known: KnownStep | None = None
        self._follower: Follower | None = None
        self._why_left = ""
        self._lacking_bytes = 0
        self._in_vain = self._sleeps = self._records = 0
        self._before = ledger.counts()
        self.learned = Learned()
        if self._steps is not None:
            self._begin(self._steps, has_again=True)

    @property
    def is_awake(self) -> bool:
        """Whether it wants to be told of operators."""
        return self._step is not None

    def before(self, function: object, noted: Noted) -> None:
        """An operator of the program is about to run, and nothing was done for it yet."""
        step = self._step
        assert step is not None
        position, met = len(step.made), len(step.met)
        asked = step.ask(function, noted)
        if self._known is None:
            if not position:
                self._join()
            return
        trace = self._known.trace
        if (
            position < len(trace.asked)
            and asked == trace.asked[position]
            and (met == len(step.met) or trace.meets(step.met, met))
        ):
            self._follow(position, Follower.before)
        else:
            self._leave(_unlike(asked, position, trace))

    def starts(self) -> None:
        """Its kernel is about to run."""
        if self._recording is not None:
            self._recording.starts()

    def after(
        self,
        storages: Sequence[torch.UntypedStorage] = (),
        contents: Sequence[Content] = (),
        before: Sequence[Content | None] = (),
    ) -> None:
        """It has run: what lies in which storages, and what did before."""
        step = self._step
        if step is None:
            return
        position = len(step.made)
        made = step.makes(contents, before)
        if self._recording is not None:
            self._recording.made(made, storages)
        if self._known is None:
            return
        if made == self._known.trace.made[position]:
            self._follow(position, Follower.after)
        else:
            self._leave(f"{step.asked[position].function} has made tensors of other sizes")

    def settles(self, content: Content) -> None:
        """A content is brought back, to stay."""
        if self._step is None:
            return
        self._follow(0, Follower.catch_up)
        if self._recording is not None:
            self._recording.settles(content)

    def free(self, lacking_bytes: int, evict: Callable[[int], bool]) -> bool:
        """Make room as the plan says, or else by eviction; return whether there is more."""
        if self._recording is None:
            return self._free(lacking_bytes, evict)
        return self._recording.evicting(lambda: self._free(lacking_bytes, evict))

    def fails(self) -> None:
        """An operator has raised: what follows is another step."""
        self._let_go("an operator has failed")
        self._step = self._recording = None

    def ends_step(self) -> None:
        """A training step is over."""
        if self._steps is None:
            return
        counts = self._parts[3].counts()
        has_again = counts.again > self._before.again
        if self._step is not None and self._step.position:
            self._learn(self._steps, self._step, counts.again_ns - self._before.again_ns)
        else:
            self._count_unplanned()
        self._let_go("")
        self._steps.take_up()
        self._begin(self._steps, has_again)

    def wait(self, seconds: float | None) -> None:
        """Wait until no plan is being sought."""
        if self._steps is not None:
            self._steps.wait(seconds)

    def close(self) -> None:
        """Let go of everything."""
        self._let_go("")
        self._step = self._recording = None
        if self._steps is not None:
            self._steps.forget()

    # -- from step to step -----------------------------------------------------------------------

    def _begin(self, steps: KnownSteps, has_again: bool) -> None:
        """A step begins: watch it, unless nothing is to be gained."""
        room, pool, _, ledger = self._parts
        self._before = ledger.counts()
        self._why_left = ""
        self._lacking_bytes = 0
        self._step = self._recording = None
        if self._sleeps:
            self._sleeps -= 1
            return
        known = steps.expected()
        if known is None and not has_again:
            return
        self._step = RunningStep()
        if known is None or self._records:
            self._records = max(0, self._records - 1)
            self._recording = Recording(self._step, room, ledger, pool.smallest_bytes)
        if known is not None:
            self._start_following(known)

    def _learn(self, steps: KnownSteps, step: RunningStep, again_ns: int) -> None:
        """A step is over that was watched."""
        known = self._known
        if known is not None and step.position == len(known.trace.asked):
            self._count(planned=1)
            overhead, bound = known.promise()
            assert self._follower is not None and known.script is not None
            self.learned = replace(
                self.learned,
                overhead=overhead,
                bound=bound,
                again=known.script.again,
                spared=self._follower.spared,
            )
            known.ran_planned(again_ns, self._lacking_bytes)
            steps.came(known)
            self._in_vain = 0
            return
        if known is not None:
            self._let_go(f"it ended after {step.position} operators")
        if self._why_left:
            self._records = _PATIENCE
        self._count_unplanned()
        if self._recording is None:
            return
        self._in_vain = 0 if steps.ran(self._recording.trace()) else self._in_vain + 1
        if self._in_vain > _PATIENCE:
            self._sleeps = min(_LONGEST_SLEEP, 1 << (self._in_vain - _PATIENCE))

    def _count_unplanned(self) -> None:
        if self._why_left:
            first = self.learned.deviation or self._why_left
            self.learned = replace(self.learned, deviation=first)
        self._count(deviated=bool(self._why_left), online=not self._why_left)

    def _count(self, planned: int = 0, online: int = 0, deviated: int = 0) -> None:
        self.learned = replace(
            self.learned,
            planned=self.learned.planned + planned,
            online=self.learned.online + online,
            deviated=self.learned.deviated + deviated,
        )

    # -- following -------------------------------------------------------------------------------

    def _start_following(self, known: KnownStep) -> None:
        _, pool, repeater, _ = self._parts
        assert known.script is not None and self._step is not None
        self._known = known
        self._follower = Follower(known.script, self._step, pool, repeater)

    def _follow(self, position: int, act: Callable[[Follower, int], None]) -> None:
        """Do what the plan says; if that does not fit, leave it."""
        if self._follower is None:
            return
        try:
            act(self._follower, position)
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            self._let_go("the plan did not fit")

    def _leave(self, why: str) -> None:
        """The step is not the one that the plan is for: follow another plan, or none."""
        self._let_go(why)
        self._join()

    def _join(self) -> None:
        """Follow the plan of a step that begins as this one has, if there is any."""
        step = self._step
        assert step is not None and self._steps is not None
        found = self._steps.beginning(step.asked, step.made, step.met)
        if found is None:
            return
        self._start_following(found)
        if step.position < len(step.asked):
            self._follow(step.position, Follower.before)
        else:
            self._follow(step.position - 1, Follower.after)

    def _let_go(self, why: str) -> None:
        """Follow no plan any more in this step."""
        if self._follower is not None:
            self._follower.leave()
            if self._follower.has_acted:
                self._why_left = self._why_left or why
        self._follower = self._known = None

    def _free(self, lacking_bytes: int, evict: Callable[[int], bool]) -> bool:
        if self._follower is not None:
            if self._follower.free(lacking_bytes):
                return True
            self._lacking_bytes = max(self._lacking_bytes, lacking_bytes)
        return evict(lacking_bytes)


def _unlike(asked: Asked, position: int, trace: Trace) -> str:
    """Say how a step differs from the one that was expected."""
    if position >= len(trace.asked):
        return f"after {position} operators it went on with {asked.function}"
    expected = trace.asked[position]
    if asked.function != expected.function:
        return f"operator {position + 1} was {asked.function} instead of {expected.function}"
    return f"operator {position + 1}, {asked.function}, was given other tensors"
