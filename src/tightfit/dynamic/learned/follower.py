"""Follows a plan: brings back what it wants back, and knows what may lose its memory first.

What the plan lets go of keeps its memory until somebody asks for room, so what comes back before
that has cost nothing.
"""

from __future__ import annotations

import torch

from tightfit.dynamic.history import Content
from tightfit.dynamic.learned.running import RunningStep
from tightfit.dynamic.learned.script import Action, Again, Script
from tightfit.dynamic.pool import Pool
from tightfit.dynamic.repeater import Repeater

__all__ = ["Follower"]


class Follower:
    """One step that follows a plan.

    Parameters
    ----------
    script : Script
        What to do around each operator.
    step : RunningStep
        Has contents by their numbers.
    pool : Pool
        Evicts.
    repeater : Repeater
        Brings back.
    """

    def __init__(self, script: Script, step: RunningStep, pool: Pool, repeater: Repeater) -> None:
        self._script = script
        self._step = step
        self._pool = pool
        self._repeater = repeater
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._locked: dict[int, Content] = {}
        self._may_go: tuple[dict[int, None], dict[int, None]] = ({}, {})
        self._waiting: tuple[Action, ...] = ()
        self.spared = 0
        """How many operators need not run again: nobody had asked for the memory meanwhile."""
        self.has_acted = False
        """Whether anything was done as the plan says."""
        for number, returns in script.gone(step.position).items():
            self._let_go(number, returns)

    def before(self, position: int) -> None:
        """An operator is about to run."""
        if self._waiting:
            self.catch_up()
        actions = self._script.before[position]
        if actions:
            self._do(actions)

    def after(self, position: int) -> None:
        """It has run."""
        for number in self._script.holds[position]:
            content = self._step.content(number)
            if content is not None:
                self._keep(number, content)
        self._waiting = self._script.after[position]

    def catch_up(self, _: int = 0) -> None:
        """Something happens after an operator: what should have been done by then is done."""
        if self._waiting:
            actions, self._waiting = self._waiting, ()
            self._do(actions)

    def free(self, lacking_bytes: int) -> bool:
        """Evict what the plan has let go of; return whether anything was."""
        freed_bytes = 0
        for may_go in self._may_go:
            while may_go and freed_bytes < lacking_bytes:
                number = next(iter(may_go))
                del may_go[number]
                content = self._step.content(number)
                if content is not None and content.is_held and self._may_be_evicted(content):
                    self._pool.evict(content)
                    freed_bytes += content.size_bytes
                    self.has_acted = True
        return freed_bytes > 0

    def leave(self) -> None:
        """Follow it no longer: eviction decides from now on."""
        for content in self._locked.values():
            self._unlock(content)
        self._locked.clear()
        self._kept.clear()
        for may_go in self._may_go:
            may_go.clear()

    def _do(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, Again):
                self._again(action.contents)
            else:
                self._let_go(action.content, action.returns)

    def _again(self, numbers: tuple[int, ...]) -> None:
        known = {n: content for n in numbers if (content := self._step.content(n))}
        missing = [content for content in known.values() if not content.is_resident]
        self.has_acted = True
        if missing:
            self._repeater.bring_all_back(missing)
        else:
            self.spared += 1
        for number, content in known.items():
            for may_go in self._may_go:
                may_go.pop(number, None)
            self._keep(number, content)

    def _keep(self, number: int, content: Content) -> None:
        """The plan needs a content that the program may have let go of, or soon will."""
        storage = content.memory
        if storage is not None:
            self._kept[number] = storage
        if content.is_private and number not in self._locked:
            content.lock()
            self._locked[number] = content

    def _let_go(self, number: int, returns: bool) -> None:
        self._kept.pop(number, None)
        locked = self._locked.pop(number, None)
        if locked is not None:
            self._unlock(locked)
            return
        content = self._step.content(number)
        if content is not None and self._may_be_evicted(content):
            self._may_go[returns][number] = None

    def _unlock(self, content: Content) -> None:
        content.unlock(was_fast=False)
        if content.is_private and content.is_resident and not content.locks:
            self._pool.drop(content)

    def _may_be_evicted(self, content: Content) -> bool:
        if content.maker is None or content.locks or not content.is_resident:
            return False
        return not self._pool.is_small(content)
