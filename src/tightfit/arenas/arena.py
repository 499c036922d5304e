"""An arena around any training loop: its memory at planned addresses, from step to step."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, replace
from types import TracebackType

from tightfit.allocator.hook import installed_hook
from tightfit.allocator.meter import cuda_requests
from tightfit.allocator.recording import Recorder, Recording, record
from tightfit.allocator.replay import (
    Replay,
    Replayed,
    interrupted,
    return_large_blocks_at_once,
    trim_ordinary_memory,
)
from tightfit.arenas.sequence import Sequenced, enlarged, requested_sizes, sequenced
from tightfit.errors import BadInput
from tightfit.progress import announce

_MOST_SHAPES = 32
"""Of which layouts are remembered at once."""


@dataclass(frozen=True)
class ArenaReport:
    """The counters of an arena so far.

    Parameters
    ----------
    steps, exact_steps : int
        Steps that ended; those in which every planned request got its place.
    requests, hits, outside, fallbacks : int
        Requests in replayed steps; requests that got their place; planned outside, as they outlive
        the step; served by the ordinary allocator instead of as planned.
    layouts : int
        How often a step was laid out, the first time included.
    height_bytes, lower_bound_bytes : int
        Of the highest layout in use: bytes it takes, and the most that is alive at one time.
    outlived_bytes, elsewhere_bytes : int
        Bytes outside of it: of blocks that outlive a step (optimizer state, tensors that the loop
        keeps); the most that other threads and interrupted parts hold at once.
    """

    steps: int = 0
    exact_steps: int = 0
    requests: int = 0
    hits: int = 0
    outside: int = 0
    fallbacks: int = 0
    layouts: int = 0
    height_bytes: int = 0
    lower_bound_bytes: int = 0
    outlived_bytes: int = 0
    elsewhere_bytes: int = 0

    @property
    def fragmentation(self) -> float:
        """Bytes of the arena above the peak of live bytes, as a share of that."""
        return self.height_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0


class Arena:
    """Memory of a loop at planned addresses (Sekiyama et al. 2018, section 4).

    Once two steps were alike, they are laid out and replayed. The k-th request gets the k-th
    planned place in one mapping, which is as high as the most that is alive at one time. Steps are
    recorded until one went as planned, and again after one that did not. Where requests were larger
    than planned and nothing else differed, a new layout is made at once (section 4.3). All that
    differs from the plan is served by the ordinary allocator, counted, and never wrong.

    While a step is only recorded, the ordinary allocator gives large blocks back at once, so that
    the process holds little more than the live bytes then, too.

    Only requests of the thread that entered are planned, and only on the CPU. Tensors that outlive
    a step are served by the ordinary allocator.

    Parameters
    ----------
    yields : bool
        Whether it ends where its thread enters another: the user has not asked for it
        explicitly.
    """

    def __init__(self, *, yields: bool = False) -> None:
        self._yields = yields
        self._thread: int | None = None
        self._replay: Replay | None = None
        self._steps: dict[Hashable, _Step] = {}
        self._running: _Step | None = None
        self._recording = contextlib.ExitStack()
        self._recorder: Recorder | None = None
        self._trims = False
        self._exact_height_bytes = 0
        self._elsewhere_before: int | None = None  # blocks of GPUs; None: that was said
        self._report = ArenaReport()

    def __enter__(self) -> Arena:
        """Begin with the first step.

        Raises
        ------
        HookUnavailable
            If the CPU's allocator cannot be hooked in this process.
        BadInput
            If this arena is in use, or its thread is in another.
        """
        installed_hook()
        if self._thread is not None:
            raise BadInput("this arena is in use: make another")
        thread = threading.get_ident()
        other = _IN_THREAD.get(thread)
        if other is not None and not other._yields:
            raise BadInput("this thread is in an arena already: arenas cannot be nested")
        if other is not None:
            other.__exit__(None, None, None)
        self._begin(None)
        self._elsewhere_before = cuda_requests()
        self._thread = thread
        _IN_THREAD[thread] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the last step; the memory is given back once nothing in it is alive."""
        self._end()
        return_large_blocks_at_once(False)
        self._steps.clear()
        if self._thread is not None and _IN_THREAD.get(self._thread) is self:
            del _IN_THREAD[self._thread]
        self._thread = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def step(self, shape: Hashable = None) -> None:
        """Mark the border between two steps, best where the fewest tensors are alive.

        Parameters
        ----------
        shape : hashable
            A key for the coming step. Steps that request other sizes, such as other lengths
            of text, each have a layout of their own in the same memory.

        Raises
        ------
        BadInput
            Outside the ``with`` block, or in another thread than the thread that entered it.
        """
        if self._thread is None:
            raise BadInput("the steps of an arena are marked inside its 'with' block")
        if self._thread != threading.get_ident():
            raise BadInput("the steps of an arena are marked in the thread that entered it")
        self.end_step()
        self._begin(shape)

    def end_step(self) -> None:
        """End a step before the next begins: requests until then belong to none."""
        step = self._running
        if step is None:
            return
        replayed, recording = self._end()
        self._announce_unplaced()
        self._note_step(replayed)
        others_went = any(other.is_confirmed for other in self._steps.values())
        if step.learn(replayed, recording, at_once=others_went):
            self._note_layout()
            self._trims = True
        self._exact_height_bytes = step.layout.height_bytes if step.is_confirmed else 0
        if self._trims and step.is_confirmed:
            self._trims = False
            trim_ordinary_memory()  # of the steps that went there before
        return_large_blocks_at_once(True)

    def interrupted(self) -> contextlib.AbstractContextManager[None]:
        """Leave requests of a ``with`` block out of the plan: they differ from step to step."""
        return interrupted()

    @property
    def report(self) -> ArenaReport:
        """Figures of the steps that ended."""
        return self._report

    def drop_pages(self) -> None:
        """Give pages back that hold nothing, between two steps: the next step differs."""
        if self._replay is not None and self._running is None:
            self._replay.drop_pages()

    @property
    def exact_height_bytes(self) -> int:
        """Of the layout that the last step went by exactly; 0 if it did not."""
        return self._exact_height_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the arena's pages that are in memory now."""
        return 0 if self._replay is None else self._replay.resident_bytes

    def _begin(self, shape: Hashable) -> None:
        step = self._step_of(shape)
        if not step.is_confirmed:
            self._recorder = self._recording.enter_context(record())
        return_large_blocks_at_once(not step.is_planned)
        if step.is_planned:
            self._enter(step)
        else:
            trim_ordinary_memory()
            if self._replay is not None:
                self._replay.drop_pages()  # memory of the step elsewhere comes in addition
        self._running = step

    def _enter(self, step: _Step) -> None:
        if not step.is_installed:
            trim_ordinary_memory()  # of the steps that were recorded: the arena comes in addition
        if not step.enter(self._room_for(step)):
            step.enter(self._another(step.layout.height_bytes))  # that arena takes no more plans

    def _step_of(self, shape: Hashable) -> _Step:
        """Return the record of steps of a shape; of very many the oldest is forgotten."""
        if shape not in self._steps and len(self._steps) == _MOST_SHAPES:
            del self._steps[next(iter(self._steps))]
        return self._steps.setdefault(shape, _Step())

    def _end(self) -> tuple[Replayed | None, Recording | None]:
        step, self._running = self._running, None
        replayed = None if step is None else step.leave()
        self._recording.close()
        recorder, self._recorder = self._recorder, None
        return replayed, None if recorder is None else recorder.recording

    def _room_for(self, step: _Step) -> Replay:
        """Return the arena; a new arena where it is too low, or a new layout would find blocks."""
        if self._replay is None:
            return self._another(step.layout.height_bytes)
        is_in_the_way = not step.is_installed and self._replay.alive > 0
        if is_in_the_way or self._replay.height_bytes < step.layout.height_bytes:
            return self._another(step.layout.height_bytes)
        return self._replay

    def _another(self, height_bytes: int) -> Replay:
        """Return a new arena; the old arena ends when it is empty."""
        if self._replay is not None:
            height_bytes = max(height_bytes, self._replay.height_bytes)
            self._replay.close()
        self._replay = Replay(height_bytes)
        return self._replay

    def _announce_unplaced(self) -> None:
        """Say, once, that memory of a GPU is requested, which has no places here."""
        before = self._elsewhere_before
        if before is None or self._yields or cuda_requests() == before:
            return
        self._elsewhere_before = None
        announce(
            "tightfit.arena() places memory of the CPU, and steps inside it request memory of a "
            "GPU: CUDA's allocator decides its addresses. tightfit.fit(model, budget, "
            "arena=True) places the steps of a model there"
        )

    def _note_step(self, replayed: Replayed | None) -> None:
        old = self._report
        self._report = replace(old, steps=old.steps + 1)
        if replayed is not None:
            self._report = replace(
                self._report,
                exact_steps=old.exact_steps + (replayed.fallbacks == 0),
                requests=old.requests + replayed.requests,
                hits=old.hits + replayed.hits,
                outside=old.outside + replayed.outside,
                fallbacks=old.fallbacks + replayed.fallbacks,
            )

    def _note_layout(self) -> None:
        highest = max(
            (step.layout for step in self._steps.values()), key=lambda layout: layout.height_bytes
        )
        self._report = replace(
            self._report,
            layouts=self._report.layouts + 1,
            height_bytes=highest.height_bytes,
            lower_bound_bytes=highest.lower_bound_bytes,
            outlived_bytes=highest.outlived_bytes,
            elsewhere_bytes=highest.elsewhere_bytes,
        )


_IN_THREAD: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
"""The arena that each thread has entered."""

_STALE = 0.5
"""Share of requests that fall back from which on a step counts as changed since it was laid out."""

_PATIENCE = 4
"""Steps recorded, no two in a row alike, before the last of them is planned."""


_NO_LAYOUT = Sequenced((), (), 0, 0, ())


class _Step:
    """Steps of one shape: their layout, and whether they go as it says."""

    def __init__(self) -> None:
        self.is_confirmed = False
        self._recorded = 0
        self._sizes: list[int] = []  # requests of the step that was recorded last
        self.layout = _NO_LAYOUT
        self._replay: Replay | None = None
        self._plan: int | None = None
        self._is_inside = False
        self._is_stale = False  # the layout is of other steps: the next is only recorded

    @property
    def is_planned(self) -> bool:
        return self.layout is not _NO_LAYOUT and not self._is_stale

    @property
    def is_installed(self) -> bool:
        """Whether its layout was replayed before."""
        return self._plan is not None

    def enter(self, replay: Replay) -> bool:
        """Take a step at planned places; False if the arena cannot have this plan."""
        if self._plan is None or self._replay is not replay:
            layout = self.layout
            self._plan = replay.add(layout.sizes, layout.offsets, layout.predecessors)
            self._replay = replay
        if self._plan is None:
            return False
        replay.begin(self._plan)
        self._is_inside = True
        return True

    def leave(self) -> Replayed | None:
        """End the step; return its counts if it was replayed."""
        if not self._is_inside:
            return None
        assert self._replay is not None
        self._is_inside = False
        return self._replay.end()

    def learn(
        self, replayed: Replayed | None, recording: Recording | None, *, at_once: bool
    ) -> bool:
        """Compare the step with its layout; return whether a new layout was made.

        `at_once`: whether the first recorded step is laid out. Others went as planned, so requests
        made only once are over; a step that is only recorded takes about twice its time.
        """
        if replayed is not None and self.layout is not _NO_LAYOUT:
            count = len(self.layout.blocks)
            self.is_confirmed = replayed.fallbacks == 0 and replayed.requests == count
            if self.is_confirmed:
                return False
            if replayed.larger == replayed.fallbacks and replayed.requests == count:
                self._take(enlarged(self.layout, self._wanted(count)))
                return True
            self._is_stale = replayed.fallbacks > _STALE * replayed.requests
        if recording is None:
            return False
        before, self._sizes = self._sizes, requested_sizes(recording)
        self._recorded += 1
        is_known = at_once or self._sizes == before or self._recorded == _PATIENCE
        if self.layout is _NO_LAYOUT and not is_known:
            return False
        self._take(sequenced(recording))
        return True

    def _wanted(self, count: int) -> list[int]:
        assert self._replay is not None and self._plan is not None
        return self._replay.wanted(self._plan, count)

    def _take(self, layout: Sequenced) -> None:
        self.layout = layout
        self._plan = None
        self._is_stale = False
