"""Contents brought back: the calls that made them run again, as many as that takes.

Kirisame et al., appendix C.4, with a stack of our own instead of recursion: chains may be longer
than Python's stack. Contents that a waiting call needs are locked, so that they are not evicted
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from tightfit.dynamic.contents import tensors_in
from tightfit.dynamic.history import Blank, Call, Content, Place
from tightfit.dynamic.ledger import Ledger
from tightfit.dynamic.pool import Pool
from tightfit.dynamic.room import Room
from tightfit.errors import BadInput
from tightfit.torch_private.storages import (
    below_autograd,
    copy_of,
    exchange_memory,
    new_memory,
    storage_of,
    take_memory,
)


class Repeater:
    """Computes again.

    `pool`: contents that may be evicted.
    """

    def __init__(self, room: Room, pool: Pool, ledger: Ledger) -> None:
        self._room = room
        self._pool = pool
        self._ledger = ledger
        self.refused = ""
        """The operator that could not run again, if the last call of `hold` failed so."""

    def hold(
        self,
        reads: Mapping[Content, torch.UntypedStorage],
        unread: Mapping[Content, torch.UntypedStorage],
    ) -> Held | Pinned:
        """Make contents that are read resident and lock them; give memory to those only written."""
        clock, count = self._ledger.clock, self._ledger.operators
        if not unread:
            for content in reads:
                if not content.is_resident:
                    break
            else:
                return Pinned(reads, clock, count)
        for content in reads:
            content.use(clock, count)
        held = Held(self._pool)
        missing = held.lock(reads)
        if missing:
            top = _Frame(None, [*reads], held, missing)
            self._work(top)
        held.mark_running()
        try:
            held.lend_memory(unread, self._room)
        except BaseException:
            held.release()
            raise
        return held

    def bring_back(self, content: Content) -> None:
        if not content.is_resident:
            self._work(self._frame(content))

    def _work(self, bottom: _Frame) -> None:
        """Run calls that a frame waits for, and its own if any; releases it if that fails."""
        stack = [bottom]
        try:
            with below_autograd():
                while stack:
                    frame = stack[-1]
                    lacking = frame.next_missing()
                    if lacking is not None:
                        stack.append(self._frame(lacking))
                        continue
                    if frame.call is not None:
                        frame.held.mark_running()
                        self._run(frame, frame.call)
                        frame.held.release()
                    stack.pop()
        finally:
            self.refused = str(stack[-1].call.function) if stack and stack[-1].call else ""
            for frame in stack:
                frame.held.release()

    def _frame(self, wanted: Content) -> _Frame:
        call = wanted.maker
        if call is None:
            raise BadInput("a tensor's memory is gone and how it was computed is unknown")
        for content in call.reads:
            content.use(self._ledger.clock, content.last_op)
        held = Held(self._pool)
        return _Frame(wanted, call.reads, held, held.lock(call.reads))

    def _run(self, frame: _Frame, call: Call) -> None:
        self._ledger.stop_if_thrashing()
        made = self._room.in_room(lambda: self._made_again(frame, call))
        if len(made) != len(call.outputs):
            raise BadInput(
                f"{frame.name} made {len(made)} storages when it ran again, and "
                f"{len(call.outputs)} before: it does not repeat itself"
            )
        for content, storage in zip(call.outputs, made, strict=True):
            if content is not None and not content.is_resident:
                self._arrive(content, storage, frame)

    def _made_again(self, frame: _Frame, call: Call) -> list[torch.UntypedStorage]:
        """Run a call, and return the storages it has written and made."""
        written = {content: self._to_write(content) for content in call.written}
        args = [_tensors_for(value, written, frame) for value in call.args]
        kwargs = {name: _tensors_for(value, written, frame) for name, value in call.kwargs.items()}
        known = {storage_of(tensor)._cdata for tensor in tensors_in([*args, *kwargs.values()])}
        started = self._ledger.moment()
        outputs = _run_with_state(call, args, kwargs)
        self._ledger.ran_again(call.cost, started)
        made = [*written.values()]
        for tensor in tensors_in(outputs):
            storage = storage_of(tensor)
            if storage._cdata not in known and self._room.has(storage) and storage.nbytes():
                known.add(storage._cdata)
                made.append(storage)
        return made

    def _to_write(self, content: Content | Blank) -> torch.UntypedStorage:
        """The memory that a call overwrites: its own if only it needs that, or else a copy.

        A copy as well where the call may have to start over.
        """
        if isinstance(content, Blank):
            return new_memory(content.size_bytes, content.device)
        storage = content.memory
        assert storage is not None
        if self._room.retries:
            return copy_of(storage)
        if content.is_private and content.locks == 1 and content.maker is not None:
            self._pool.drop(content)
            return storage
        return copy_of(storage)

    def _arrive(self, content: Content, storage: torch.UntypedStorage, frame: _Frame) -> None:
        """Give a computed content to the storage that waits for it, or to calls that need it."""
        if storage.nbytes() != content.size_bytes:
            raise BadInput(
                f"{frame.name} made {storage.nbytes()} bytes when it ran again, and "
                f"{content.size_bytes} before: it does not repeat itself"
            )
        waiting = content.memory if content.is_held else None
        if waiting is None and content is not frame.wanted and not content.locks:
            return
        self._pool.came_back(content)
        if waiting is not None:
            exchange_memory(waiting, storage)
            content.arrive()
        else:
            content.arrive(own=storage)
        self._pool.offer(content)
        if content.maker is not None:
            content.maker.release_reads()


class Pinned:
    """Contents that an operator of the program reads, all of them resident.

    `contents`: it is in storages of the program.
    """

    __slots__ = ("_contents",)

    def __init__(self, contents: Iterable[Content], clock: int, op: int) -> None:
        self._contents = contents
        for content in contents:
            content.pin(clock, op)

    def release(self) -> None:
        """Unlock them: the operator has run."""
        for content in self._contents:
            content.unpin()


class Held:
    """Contents that are locked, with their storages.

    While others are computed, they may be evicted if nothing else is left: only inputs of a running
    operator must stay.

    `pool`: contents that may be evicted.
    """

    __slots__ = ("_fast", "_lent", "_pool", "_storages")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._storages: dict[Content, torch.UntypedStorage] = {}
        self._fast: set[Content] = set()
        self._lent: dict[Content, torch.UntypedStorage] = {}

    def lock(self, contents: Iterable[Content]) -> list[Content]:
        missing: list[Content] = []
        for content in contents:
            storage = content.memory if content.is_resident else None
            if storage is None:
                if content.is_resident:
                    self._pool.ended(content)
                missing.append(content)
            else:
                if content not in self._storages:
                    content.lock()
                self._storages[content] = storage
        return missing

    def mark_running(self, contents: Iterable[Content] | None = None) -> None:
        """Let none of them be evicted from now on, or none of `contents`."""
        for content in self._storages if contents is None else contents:
            if content not in self._fast:
                self._fast.add(content)
                content.mark_running()

    def lend_memory(self, unread: Mapping[Content, torch.UntypedStorage], room: Room) -> None:
        """Let storages whose content is not read be written, whether they have memory or not."""
        for content in self.lock(unread):
            storage = unread[content]
            memory = room.in_room(partial(new_memory, content.size_bytes, storage.device))
            exchange_memory(storage, memory)
            self._lent[content] = storage
        self.mark_running()

    def release(self) -> None:
        """Unlock them; contents that were not written after all have no memory again."""
        for content, storage in self._lent.items():
            if content.is_held:
                take_memory(storage)
        self._lent.clear()
        contents = [*self._storages]
        self._storages.clear()
        for content in contents:
            content.unlock(was_fast=content in self._fast)
            if content.is_private and not content.locks:
                self._pool.retire(content)
        self._fast.clear()


class _Frame:
    """A call that waits until all that it reads is resident.

    `wanted`: why it runs; None: for the operator of the program, which runs elsewhere. `missing`:
    contents that are not resident.
    """

    __slots__ = ("_missing", "_reads", "_rounds", "call", "held", "wanted")

    def __init__(
        self, wanted: Content | None, reads: Iterable[Content], held: Held, missing: list[Content]
    ) -> None:
        self.wanted = wanted
        self.call = None if wanted is None else wanted.maker
        self.held = held
        self._reads = reads
        self._missing = _costliest_last(missing)
        self._rounds = 0

    @property
    def name(self) -> str:
        return str(self.call.function) if self.call is not None else ""

    def next_missing(self) -> Content | None:
        """Return the content to be computed next; None if all are resident.

        A content evicted while the call waited is computed again, and stays this time.
        """
        while True:
            while self._missing:
                if self.held.lock(self._missing[-1:]):
                    return self._missing[-1]
                if self._rounds:
                    self.held.mark_running(self._missing[-1:])
                self._missing.pop()
            self._missing = _costliest_last(self.held.lock(self._reads))
            if not self._missing:
                return None
            self._rounds += 1


def _costliest_last(contents: list[Content]) -> list[Content]:
    if len(contents) < 2:
        return contents
    return sorted(contents, key=lambda c: 0 if c.maker is None else c.maker.cost)


def _run_with_state(call: Call, args: Any, kwargs: Any) -> Any:
    """Run a call with the random numbers, and with gradients enabled or not, as it ran first."""
    with torch.set_grad_enabled(call.with_grad):
        if call.drawn_from is None:
            return call.function(*args, **kwargs)
        generator, state = call.drawn_from
        now = generator.get_state()
        generator.set_state(state)
        try:
            return call.function(*args, **kwargs)
        finally:
            generator.set_state(now)


def _tensors_for(
    value: Any, written: Mapping[Content | Blank, torch.UntypedStorage], frame: _Frame
) -> Any:
    """Return an argument with tensors in the place of places and blanks."""
    if isinstance(value, Place):
        storage = written.get(value.content, value.content.memory)
        assert storage is not None
        if storage.nbytes() != value.content.size_bytes:
            raise BadInput(f"{frame.name} reads memory that was resized out of sight")
        return value.tensor_in(storage)
    if isinstance(value, Blank):
        storage = written[value] if value in written else new_memory(value.size_bytes, value.device)
        return value.place.tensor_in(storage)
    if isinstance(value, list | tuple):
        return type(value)(_tensors_for(each, written, frame) for each in value)
    return value
