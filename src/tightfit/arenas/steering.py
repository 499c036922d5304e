"""A step whose requests are led to their places by fillers, in memory of any kind.

Whatever the allocator does, it never gives out bytes that are held, by a filler or by anybody
else. So a step that differs from its script cannot go wrong: it only lies elsewhere.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from tightfit.arenas.arena import ArenaReport
from tightfit.layout.holes import LEAST_BYTES, Filler, Script

__all__ = ["Ground", "Steered", "Steering"]


class Ground(Protocol):
    """Memory of an allocator that takes a free stretch at an address, if it is asked to."""

    @property
    def height_bytes(self) -> int:
        """Its size."""
        ...

    def place(self, offset: int, size_bytes: int) -> Any | None:
        """Hold a stretch as long as what is returned lives; None if some of it is held."""
        ...

    def enter(self) -> None:
        """Let what the calling thread requests lie here, from now on."""
        ...

    def leave(self) -> None:
        """Let it lie elsewhere again; nothing happens outside."""
        ...


class Steered:
    """One step: from its forward to the end of its backward.

    Parameters
    ----------
    script : Script
        Of its plan.
    ground : Ground or None
        Where it lies; None: wherever the allocator puts it, as another step lies there.

    Attributes
    ----------
    failed : int
        Fillers that found their place held: 1 at most, as none is set afterwards.
    outlived : bool
        Whether something of an earlier step was there at its beginning.
    """

    def __init__(self, script: Script, ground: Ground | None) -> None:
        self.script = script
        self.failed = 0
        self._ground = ground
        self._fillers: dict[int, Any] = {}
        self._is_led = ground is not None and self._fill(_everything(script, ground))
        self.outlived = ground is not None and not self._is_led

    @property
    def is_exact(self) -> bool:
        """Whether every filler so far found its stretch free."""
        return self._is_led and not self.failed

    def turn(self, instruction: int) -> None:
        """Make ready for an instruction; called before each one that requests large blocks."""
        turn, ground = self.script.turns[instruction], self._ground
        if ground is None:
            return
        if not turn.is_inside:
            ground.leave()
            return
        ground.enter()
        if not self._is_led:
            return
        for number in turn.drops:
            del self._fillers[number]
        self._is_led = self._fill(turn.fills)

    def pause(self) -> None:
        """Let requests lie elsewhere until the next turn: code of others runs."""
        if self._ground is not None:
            self._ground.leave()

    def end(self) -> None:
        """Let go of all fillers: nothing more is requested."""
        self.pause()
        self._fillers.clear()

    def _fill(self, fillers: tuple[Filler, ...]) -> bool:
        assert self._ground is not None
        for filler in fillers:
            held = self._ground.place(filler.offset, filler.size_bytes)
            if held is None:
                # somebody lies there: from now on the allocator chooses among all that is free
                self._fillers.clear()
                self.failed += 1
                return False
            self._fillers[filler.number] = held
        return True


def _everything(script: Script, ground: Ground) -> tuple[Filler, ...]:
    """Return what holds all of a ground before a step begins, and what lies above it for good."""
    above_bytes = ground.height_bytes - script.height_bytes
    above = Filler(-1, script.height_bytes, above_bytes)
    return (script.everything, above) if above_bytes else (script.everything,)


class Steering:
    """The steps of a model in one stretch of memory, one after another.

    A step that begins while another one still awaits its backward lies elsewhere.

    Parameters
    ----------
    ground_for : callable
        Returns memory that is so many bytes high; raises a `RuntimeError` if there is none.
    """

    def __init__(self, ground_for: Callable[[int], Ground]) -> None:
        self._ground_for = ground_for
        self._ground: Ground | None = None
        self._step: weakref.ref[Steered] | None = None
        self._report = ArenaReport()
        self._outlived = False

    @property
    def outlived(self) -> bool:
        """Whether a step began while something of the one before was still alive."""
        return self._outlived

    @property
    def report(self) -> ArenaReport:
        """What happened in the steps that ended; a fallback: a filler that found its place held."""
        return self._report

    def begin(self, script: Script) -> Steered:
        """Begin a step."""
        if self._step is not None and self._step() is not None:
            return Steered(script, None)
        step = Steered(script, self._high_enough(script.height_bytes))
        self._outlived = self._outlived or step.outlived
        self._step = weakref.ref(step)
        return step

    def end(self, step: Steered) -> None:
        """End a step; another one may begin."""
        step.end()
        if self._step is not None and self._step() is step:
            self._step = None
        old, script = self._report, step.script
        self._report = replace(
            old,
            steps=old.steps + 1,
            exact_steps=old.exact_steps + step.is_exact,
            requests=old.requests + script.requests,
            hits=old.hits + (script.requests if step.is_exact else 0),
            fallbacks=old.fallbacks + step.failed,
            layouts=old.layouts + (script.height_bytes != old.height_bytes),
            height_bytes=script.height_bytes,
            lower_bound_bytes=script.lower_bound_bytes,
            outlived_bytes=script.outside_bytes,
        )

    def leave(self) -> None:
        """Give the memory back, once nothing in it is alive."""
        self._ground = None

    def _high_enough(self, height_bytes: int) -> Ground | None:
        """Return the memory; another one where it is too low, None where there is no room."""
        if not height_bytes:
            return None
        if self._ground is None or self._ground.height_bytes < height_bytes:
            self._ground = None
            with contextlib.suppress(RuntimeError):
                self._ground = self._ground_for(max(height_bytes, LEAST_BYTES))
        return self._ground
