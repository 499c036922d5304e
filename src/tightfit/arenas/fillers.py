"""A step whose requests fillers bring to their planned places, in memory of any kind.

In any case the allocator never gives out bytes that are held, by a filler or anything else. So a
step that differs from its script cannot go wrong: it only gets other addresses.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tightfit.allocator.cuda_arena_memory import CudaArenaMemory
from tightfit.arenas.arena import ArenaReport
from tightfit.layout.blocks import Block
from tightfit.layout.holes import LEAST_BYTES, Filler, Opening, Script, script_of

_MIB = 1 << 20
_TRIED = [  # alone and two at once, side by side, smaller than their cells, among others and alike
    Block(0, 0, 9, 8 * _MIB - 512),
    Block(1, 2, 9, 4 * _MIB - 512),
    Block(2, 4, 5, 6 * _MIB),
    Block(3, 4, 9, 3 * _MIB),
    Block(4, 6, 7, 2 * _MIB - 1024),
    Block(5, 8, 9, 6 * _MIB),
]
_MOST_FAILURES = 4  # a filler that has no room in the arena takes more from the device


class FilledStep:
    """One step: from its forward to the end of its backward.

    `memory`: of the arena; None: wherever the allocator puts it, as another step uses the arena.
    `notes_growth`: whether to find out which instructions have no room. `failed`: fillers that came
    to be elsewhere, or would have: 1 at most, as none is set afterwards. `outlived`: whether
    something of an earlier step was there at its beginning. `crowded`: instructions with requests
    that had no room, or after which a filler had none.
    """

    def __init__(
        self, script: Script, memory: CudaArenaMemory | None, *, notes_growth: bool = False
    ) -> None:
        self.script = script
        self.failed = 0
        self.crowded: set[int] = set()
        self._growing = memory if notes_growth else None
        self._reserved_bytes = 0
        self._last: int | None = None  # the instruction that runs inside
        self._memory = memory
        self._fillers: dict[int, Any] = {}
        self.outlived = memory is not None and memory.state() != "free"
        self.failed += self.outlived
        self._is_filled = memory is not None and not self.outlived
        if memory is not None and self._is_filled:
            self._is_filled = self._hold(_everything(script, memory), [])
        self._note_growth(None)

    @property
    def is_exact(self) -> bool:
        """Whether every filler so far was placed where planned."""
        return self._is_filled and not self.failed

    def turn(self, instruction: int) -> None:
        """Make ready for an instruction; called before each that requests large blocks."""
        turn, memory = self.script.turns[instruction], self._memory
        if memory is None:
            return
        if turn.is_inside:
            memory.enter()
        else:
            memory.leave()
        self._note_growth(self._last)
        before, self._last = self._last, instruction if turn.is_inside else None
        if self._is_filled and turn.is_inside:
            self._is_filled = self._refill(turn.refills) and self._open(turn.openings)
            if not self._is_filled and before is not None and self._growing is not None:
                self.crowded.add(before)
            self._note_growth(None)

    def pause(self) -> None:
        """Let requests be placed elsewhere until the next turn: code of others runs."""
        self._note_growth(self._last)
        self._last = None
        if self._memory is not None:
            self._memory.leave()

    def end(self) -> None:
        """Free all fillers: nothing more is requested."""
        self.pause()
        self._fillers.clear()

    def _note_growth(self, instruction: int | None) -> None:
        """Note that an instruction, if any, has had no room for its requests."""
        if self._growing is None or not self._is_filled:
            return
        reserved_bytes = self._growing.reserved_bytes
        if instruction is not None and reserved_bytes > self._reserved_bytes:
            self.crowded.add(instruction)
        self._reserved_bytes = reserved_bytes

    def _refill(self, fillers: Sequence[Filler]) -> bool:
        """Hold stretches that have become free; of stretches of one size, any is taken first."""
        assert self._memory is not None
        waiting = {filler.offset: filler for filler in fillers}
        for filler in fillers:
            taken = self._memory.take(filler.size_bytes)
            found = waiting.pop(taken[0], None) if taken is not None else None
            if taken is None or found is None or found.size_bytes != filler.size_bytes:
                return self._differs()
            assert found.number is not None
            self._fillers[found.number] = taken[1]
        return True

    def _open(self, openings: Sequence[Opening]) -> bool:
        places: list[Any] = []
        for opening in openings:
            for number in opening.drops:
                del self._fillers[number]
            if not self._hold(opening.pieces, places):
                return False
        return True  # the fillers in the places are freed

    def _hold(self, pieces: Sequence[Filler], places: list[Any]) -> bool:
        """Hold pieces one after the other, from the only free stretch there is."""
        assert self._memory is not None
        for piece in pieces:
            taken = self._memory.take(piece.size_bytes)
            if taken is None or taken[0] != piece.offset:
                return self._differs()
            if piece.number is None:
                places.append(taken[1])
            else:
                self._fillers[piece.number] = taken[1]
        return True

    def _differs(self) -> bool:
        """Hold nothing any more: from now on the allocator chooses among all that is free."""
        self._fillers.clear()
        self.failed += 1
        return False


def placing_obstacle(memory_for: Callable[[int], CudaArenaMemory]) -> str | None:
    """Return why an allocator's requests cannot be placed; None if they can.

    Tries it: a short step, twice.

    `memory_for`: returns memory that is so many bytes high; raises a `RuntimeError` if there is
    none.
    """
    script = script_of(_TRIED)
    try:
        memory = memory_for(max(script.height_bytes, LEAST_BYTES))
    except RuntimeError as error:
        return str(error)
    for _ in range(2):
        step, alive = FilledStep(script, memory), dict[int, Any]()
        for tick in sorted({block.lower for block in _TRIED}):
            for block in _TRIED:
                if block.upper <= tick:
                    alive.pop(block.id, None)
            step.turn(tick // 2)
            for block in (b for b in _TRIED if b.lower == tick):
                taken = memory.take(block.size_bytes)
                if taken is None or taken[0] != script.places[block.id]:
                    return "a request is not placed in the only place that is free"
                alive[block.id] = taken[1]
                del taken  # it is alive as long as its block
        step.end()
        alive.clear()
        if not step.is_exact:
            return "blocks are not at their planned addresses: see expandable segments"
    return None


def _everything(script: Script, memory: CudaArenaMemory) -> tuple[Filler, ...]:
    """Return holders of all of the memory before a step begins, and of memory above it for good."""
    above_bytes = memory.height_bytes - script.height_bytes
    above = Filler(-1, script.height_bytes, above_bytes)
    return (script.everything, above) if above_bytes else (script.everything,)


class FillerPlacement:
    """The steps of a model in one stretch of memory, one after another.

    A step that begins while another still awaits its backward is placed elsewhere.

    `memory_for`: returns memory that is so many bytes high; raises a `RuntimeError` if there is
    none.
    """

    def __init__(self, memory_for: Callable[[int], CudaArenaMemory]) -> None:
        self._memory_for = memory_for
        self._memory: CudaArenaMemory | None = None
        self._step: weakref.ref[FilledStep] | None = None
        self.report = ArenaReport()  # of steps that ended; a fallback: a filler placed elsewhere
        self.outlived = False  # whether a step began while something of the last was alive
        self._failures = 0  # in steps, one after the other

    @property
    def height_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.height_bytes

    def begin(self, script: Script, *, notes_growth: bool = False) -> FilledStep:
        """Begin a step.

        `notes_growth`: whether to find out which instructions have no room, which takes time.
        """
        if self._step is not None and self._step() is not None:
            return FilledStep(script, None)
        if self._failures >= _MOST_FAILURES:
            self._memory = None
            return FilledStep(script, None)
        memory = self._high_enough(script.height_bytes)
        step = FilledStep(script, memory, notes_growth=notes_growth)
        self.outlived = self.outlived or step.outlived
        self._step = weakref.ref(step)
        return step

    def end(self, step: FilledStep) -> None:
        """End a step; another may begin."""
        step.end()
        if self._step is not None and self._step() is step:
            self._step = None
        is_failure = step.failed and not (step.outlived or step.crowded)
        self._failures = self._failures + 1 if is_failure else 0
        old, script = self.report, step.script
        self.report = replace(
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
        self._memory = None

    def _high_enough(self, height_bytes: int) -> CudaArenaMemory | None:
        """Return the memory; new memory where it is too small, None where there is no room."""
        if not height_bytes:
            return None
        known = self._memory
        if known is None or known.height_bytes < height_bytes or known.state() == "grown":
            self._memory = known = None
            with contextlib.suppress(RuntimeError):
                self._memory = self._memory_for(max(height_bytes, LEAST_BYTES))
        return self._memory
