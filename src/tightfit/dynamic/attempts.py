"""Operators of the program in which requests are refused: evict, and run them again.

An operator that reads a tensor it writes must not run again, for it may have begun to write. Nor
may an operator that other processes wait for. Room is made for it before it runs: as much as it
took the last time, or, the first time, as its arguments take. If it is refused all the same, that
is an error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch

from tightfit.allocator.refusals import is_refusal
from tightfit.dynamic.contents import tensors_in
from tightfit.dynamic.draws import Drawn
from tightfit.dynamic.operators import Operator
from tightfit.dynamic.room import RetryingRoom
from tightfit.torch_private.storages import storage_of

_MOST_KNOWN = 4096


class Given(NamedTuple):
    operator: Operator  # facts of its schema
    # args, kwargs: its arguments
    args: Any
    kwargs: Any


class HasBegun(RuntimeError):
    """An operator was refused memory that may have begun to write into its arguments."""


class Attempts:
    def __init__(self, room: RetryingRoom) -> None:
        self._room = room
        self._takes: dict[Hashable, int] = {}

    def run(self, call: Given, run: Callable[[], Any], drawn_from: Drawn | None = None) -> Any:
        """Return an operator's result.

        `drawn_from`: the generator that it draws from, and its state before. Raises `HasBegun` if
        it cannot run again, and was refused memory.
        """
        operator, args, kwargs = call.operator, call.args, call.kwargs
        writes = operator.written
        if operator.trains(args, kwargs):
            writes = (*writes, *operator.statistics)
        written = [tensor for each in writes for tensor in tensors_in(each.of(args, kwargs))]
        given = tensors_in([*args, *kwargs.values()])
        may_repeat = operator.repeats_with(args, kwargs)
        if not may_repeat or (written and not _replaces(operator, written, given)):
            return self._run_once((operator.name, *map(_form, given)), given, run)
        before = [(t, t.size(), t.stride(), t.storage_offset()) for t in written]

        def attempt() -> Any:
            try:
                return run()
            except RuntimeError as error:
                if is_refusal(error):
                    _put_back(before, drawn_from)
                raise

        return self._room.in_room(attempt)

    def _run_once(self, key: Hashable, given: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Make room before an operator that cannot run again."""
        known_bytes = self._takes.get(key)
        size_bytes = sum(map(_size_of, given)) if known_bytes is None else known_bytes
        if size_bytes:
            self._room.make(size_bytes)
        try:
            if known_bytes is not None:
                return run()
            result, taken_bytes = self._room.taken_by(run)
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            self._room.refused(error)
            traceback.clear_frames(error.__traceback__)
            self._know(key, size_bytes + self._room.refusals().asked_bytes)
            raise HasBegun(str(error)) from error
        self._know(key, taken_bytes)
        return result

    def _know(self, key: Hashable, taken_bytes: int) -> None:
        if len(self._takes) >= _MOST_KNOWN:
            self._takes.clear()
        self._takes[key] = taken_bytes


def _replaces(
    operator: Operator, written: list[torch.Tensor], given: Iterable[torch.Tensor]
) -> bool:
    """Whether an operator does the same if it has written a part of its result already."""
    if not operator.replaces or operator.statistics:
        return False
    mine = {id(tensor) for tensor in written}
    try:
        places = {storage_of(tensor)._cdata for tensor in written}
        read = {storage_of(tensor)._cdata for tensor in given if id(tensor) not in mine}
    except (NotImplementedError, RuntimeError):  # a sparse one, which has none
        return False
    return len(places) == len(written) and not places & read


def _put_back(shapes: list[tuple[torch.Tensor, Any, Any, int]], drawn_from: Drawn | None) -> None:
    """Undo changes that an operator may have made before it was refused memory."""
    for tensor, size, stride, offset in shapes:
        if tensor.size() != size or tensor.stride() != stride:  # without the memory for it
            tensor.as_strided_(size, stride, offset)
    if drawn_from is not None:
        generator, state = drawn_from
        generator.set_state(state)


def _form(tensor: torch.Tensor) -> Hashable:
    size = tensor.numel() if tensor.is_nested else tuple(tensor.size())
    return tensor.dtype, tensor.layout, size


def _size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
