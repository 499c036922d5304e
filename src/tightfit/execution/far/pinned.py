"""Far memory of a step on a GPU: pinned memory of the host, copied by two streams.

Nothing here waits on the host. A copy waits for the operators before it, and operators wait for a
copy, by events of streams. Memory of the device is taken and freed in the stream of the operators,
after they wait for the copy, so its allocator may give it out again at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tightfit.errors import OffloadFailed
from tightfit.execution.far.space import FarValue, Space
from tightfit.execution.far.step import FarStep
from tightfit.units import format_bytes

_CHUNK_BYTES = 32 << 20  # a power of two: PyTorch pins no less
_UNIT_BYTES = 512  # as sizes in graphs of a GPU
_MOST_PENDING = 8  # steps whose waits are not known yet

Stream: TypeAlias = Any
Event: TypeAlias = Any
Pair: TypeAlias = tuple[Event, Event]


class CudaStreams:
    """The streams of a device: that of its operators, and one for copies in each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stores: Stream = torch.cuda.Stream(device)
        self.loads: Stream = torch.cuda.Stream(device)

    def current(self) -> Stream:
        """Return the stream that operators of this thread are in now."""
        return torch.cuda.current_stream(self._device)

    def mark(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Return an event: all that is in a stream so far has run."""
        event = torch.cuda.Event(enable_timing=is_timed)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what comes next in a stream wait for an event."""
        stream.wait_event(event)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def pinned(self, size: int) -> torch.Tensor:
        """Return bytes of the host that a stream copies to and from by itself."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def seconds(self, begin: Event, end: Event) -> float | None:
        """Return the time between two timed events; None: it is not known yet."""
        return begin.elapsed_time(end) / 1e3 if end.query() else None


@dataclass(frozen=True)
class _Chunk:
    """A piece of pinned memory, and the event after which it may be written."""

    memory: torch.Tensor
    free: Event = None


class PinnedMemory:
    """The pinned memory of one fitted model on one device: steps borrow it in chunks.

    `size_bytes`: how much a step may hold.
    """

    def __init__(self, size_bytes: int, streams: CudaStreams) -> None:
        self.size_bytes = size_bytes
        self.streams = streams
        self.chunk_bytes = min(_CHUNK_BYTES, 1 << max(0, size_bytes - 1).bit_length())
        self.pinned_bytes = 0
        self.waits = Waits(streams)
        self._idle: list[_Chunk] = []  # changed by one operation at a time: no lock

    def lend(self) -> _Chunk:
        """Return a chunk that no other step has.

        Raises `OffloadFailed` if no further memory can be pinned.
        """
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            memory = self.streams.pinned(self.chunk_bytes)
        except (RuntimeError, MemoryError) as error:
            raise OffloadFailed(
                f"{format_bytes(self.chunk_bytes)} more of the host's memory could not be pinned "
                f"for offload= ({str(error).splitlines()[0]}) after "
                f"{format_bytes(self.pinned_bytes)}: the step is dropped, parameters are as before "
                "it. Way out: a smaller offload=, or more free memory on the host"
            ) from error
        self.pinned_bytes += self.chunk_bytes
        return _Chunk(memory)

    def take_back(self, chunks: list[_Chunk]) -> None:
        """Take the chunks of a step that has ended; loads from them may still run."""
        if chunks:
            free = self.streams.mark(self.streams.loads)
            self._idle += [_Chunk(chunk.memory, free) for chunk in chunks]
            chunks.clear()


class Waits:
    """How long operators have waited for copies, read once the device has got there."""

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._pending: deque[tuple[Pair, ...]] = deque(maxlen=_MOST_PENDING)
        self._last_s = 0.0

    def end_step(self, pairs: Sequence[Pair]) -> None:
        """Note the events before and after each wait of a step."""
        self.last_s()
        self._pending.append(tuple(pairs))

    def last_s(self) -> float:
        """Return how long operators waited in the last step for which it is known."""
        while self._pending:
            found = [self._streams.seconds(*pair) for pair in reversed(self._pending[0])]
            known = [seconds for seconds in found if seconds is not None]
            if len(known) < len(found):
                break
            self._last_s = sum(known)
            self._pending.popleft()
        return self._last_s


@dataclass(frozen=True)
class _Transfer:
    """A copy under way.

    `home`: the stream whose operators use the memory. `content`: the memory, not freed meanwhile.
    """

    home: Stream
    done: Event
    content: torch.Tensor


class PinnedStep(FarStep):
    """Values of one step in pinned memory of the host."""

    def __init__(self, memory: PinnedMemory) -> None:
        super().__init__(Space(memory.size_bytes, _UNIT_BYTES))
        self._memory = memory
        self._streams = memory.streams
        self._chunks: list[_Chunk] = []
        self._under_way: dict[int, _Transfer] = {}
        self._stored: dict[int, Event] = {}  # values in far memory: since when
        self._unread: list[Event] = []  # after which places may be written that were given back
        self._waits: list[Pair] = []
        ends = self._memory, self._under_way, self._chunks, self._waits
        self.close = weakref.finalize(self, _close, *ends)
        self.close.atexit = False

    def _begin_store(self, value: int, content: torch.Tensor, away: FarValue) -> None:
        streams = self._streams
        while len(self._chunks) * self._memory.chunk_bytes < self._space.most_bytes:
            chunk = self._memory.lend()
            self._chunks.append(chunk)
            if chunk.free is not None:
                self._unread.append(chunk.free)
        for event in self._unread:
            streams.wait(streams.stores, event)
        self._unread.clear()
        self._begin(
            value,
            content,
            streams.stores,
            [(far, near) for near, far in self._pieces(content, away)],
        )
        self._stored[value] = self._under_way[value].done

    def _begin_load(self, value: int, content: torch.Tensor, away: FarValue) -> None:
        self._streams.wait(self._streams.loads, self._stored[value])
        self._begin(value, content, self._streams.loads, list(self._pieces(content, away)))

    def _begin(
        self,
        value: int,
        content: torch.Tensor,
        stream: Stream,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Copy in a stream, after the operators so far. `copies`: targets and sources."""
        streams = self._streams
        home = streams.current()
        streams.wait(stream, streams.mark(home))
        try:
            for target, source in copies:
                streams.copy(stream, target, source)
        finally:  # what has begun is waited for, also where another copy has failed
            self._under_way[value] = _Transfer(home, streams.mark(stream), content)

    def _pieces(
        self, content: torch.Tensor, away: FarValue
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of a value with their places, each within one chunk."""
        done, chunk_bytes = 0, self._memory.chunk_bytes
        for begin, size in away.extents:
            place, end = begin, begin + min(size, away.nbytes - done)
            while place < end:
                number, inside = divmod(place, chunk_bytes)
                length = min(end - place, chunk_bytes - inside)
                far = self._chunks[number].memory[inside : inside + length]
                yield content[done : done + length], far
                place, done = place + length, done + length

    def _arrive(self, value: int) -> None:
        streams, transfer = self._streams, self._under_way[value]
        current = streams.current()
        before = streams.mark(current, is_timed=True)
        streams.wait(current, transfer.done)
        self._waits.append((before, streams.mark(current, is_timed=True)))
        if value in self._last:
            self._unread.append(transfer.done)
            del self._stored[value]
        del self._under_way[value]

    def _stalled_s(self) -> float:
        return self._memory.waits.last_s()


def _close(
    memory: PinnedMemory, under_way: dict[int, _Transfer], chunks: list[_Chunk], waits: list[Pair]
) -> None:
    """End a step: operators wait for transfers under way, whose memory may then be freed."""
    for transfer in under_way.values():
        memory.streams.wait(transfer.home, transfer.done)
    under_way.clear()
    memory.take_back(chunks)
    memory.waits.end_step(waits)
