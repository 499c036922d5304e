"""The values of one step in far memory, and transfers in flight."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec
import torch

from tightfit.errors import OffloadFailed
from tightfit.execution.far.copier import Copier, Extent, Transfer, reading, writing
from tightfit.execution.far.offload import Offload
from tightfit.execution.lower import Program
from tightfit.units import format_bytes


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that a step moves."""

    # stored_bytes, loaded_bytes: to far memory, and back
    stored_bytes: int
    loaded_bytes: int
    far_bytes: int  # the most that is there at an instant
    stall_s: float  # how long operators wait for that


@dataclass(frozen=True)
class _FarValue:
    """A value in far memory: where, and the function that makes a tensor of its bytes."""

    extents: tuple[Extent, ...]
    nbytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Space:
    """Which bytes of a file are taken."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._free: list[Extent] = []
        self.most_bytes = 0
        self._taken = 0

    def take(self, size: int) -> tuple[Extent, ...]:
        """Return places for so many bytes, in several pieces where need be.

        Raises `OffloadFailed` if the budget has no room for them.
        """
        if self._taken + size > self._offload.size_bytes:
            raise OffloadFailed(
                f"a step would hold {format_bytes(self._taken + size)} in far memory, more than "
                f"its plan said and than offload={format_bytes(self._offload.size_bytes)} allows"
            )
        self._taken += size
        found: list[Extent] = []
        while size and self._free:
            begin, length = self._free.pop()
            found.append((begin, min(length, size)))
            if length > size:
                self._free.append((begin + size, length - size))
            size -= found[-1][1]
        if size:
            found.append((self.most_bytes, size))
            self.most_bytes += size
        return tuple(found)

    def give(self, extents: Sequence[Extent]) -> None:
        """Have bytes taken no longer; neighbours become one piece."""
        self._taken -= sum(size for _, size in extents)
        pieces = sorted([*self._free, *extents])
        self._free = pieces[:1]
        for begin, size in pieces[1:]:
            last, length = self._free[-1]
            if last + length == begin:
                self._free[-1] = (last, length + size)
            else:
                self._free.append((begin, size))


class FarStep:
    """The places of one step's values while they are away.

    The file has no name: nothing is left of it when the process ends, however it ends.

    `offload`: how much may be there, and in which folder.
    """

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._space = _Space(offload)
        self._away: dict[int, _FarValue] = {}
        self._under_way: dict[int, tuple[Copier, Transfer]] = {}
        self._last: set[int] = set()  # values whose last load is in flight
        self._stored_bytes = self._loaded_bytes = 0
        self._stall_s = 0.0
        try:
            file = tempfile.TemporaryFile(dir=offload.place, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._failed(error) from error
        self._stores = Copier(writing(file.fileno()), "tightfit far memory, stores")
        self._loads = Copier(reading(file.fileno()), "tightfit far memory, loads")
        self.close = weakref.finalize(self, _close, file, self._stores, self._loads)

    def store(self, value: int, tensor: torch.Tensor) -> None:
        """Begin to copy a value to far memory."""
        storage = tensor.untyped_storage()
        extents = self._space.take(storage.nbytes())
        self._away[value] = _FarValue(
            extents,
            storage.nbytes(),
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
        )
        self._under_way[value] = self._stores, self._stores.begin(_bytes_of(storage), extents)
        self._stored_bytes += storage.nbytes()

    def load(self, value: int, *, is_last: bool = False) -> torch.Tensor:
        """Take memory for a value and begin to bring it back; it is not there before `wait`.

        `is_last`: whether nothing of it stays in far memory then.
        """
        away = self._away[value]
        storage = torch.empty(away.nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        self._under_way[value] = self._loads, self._loads.begin(_bytes_of(storage), away.extents)
        self._loaded_bytes += away.nbytes
        if is_last:
            self._last.add(value)
        empty = torch.empty(0, dtype=away.dtype, device="cpu")
        return empty.set_(storage, away.offset, away.size, away.stride)

    def wait(self, value: int) -> None:
        """Return once no transfer of a value is in flight.

        Raises `OffloadFailed` if it could not be copied.
        """
        copier, transfer = self._under_way.pop(value)
        began = time.perf_counter()
        copier.wait(transfer)
        self._stall_s += time.perf_counter() - began
        if transfer.error is not None:
            raise self._failed(transfer.error) from transfer.error
        if value in self._last:
            self._last.remove(value)
            self._space.give(self._away.pop(value).extents)

    @property
    def moved(self) -> Moved:
        return Moved(
            stored_bytes=self._stored_bytes,
            loaded_bytes=self._loaded_bytes,
            far_bytes=self._space.most_bytes,
            stall_s=self._stall_s,
        )

    def _failed(self, error: BaseException) -> OffloadFailed:
        why = (error.strerror if isinstance(error, OSError) else None) or repr(error)
        return OffloadFailed(
            f"far memory in {self._offload.place} failed during a step ({why}) after "
            f"{format_bytes(self._stored_bytes)} were stored: the step is dropped, parameters are "
            "as before it. Way out: a folder with more room (tightfit.Offload(size, "
            "folder=...)), or a smaller offload="
        )


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a storage, which it keeps alive."""
    return memoryview(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy())


def _close(file: BinaryIO, *copiers: Copier) -> None:
    for copier in copiers:
        copier.close()
    file.close()


def moving_program(
    program: Program, offload: Offload, ended: Callable[[Moved], None] = lambda moved: None
) -> Program:
    """Return a program whose steps each have far memory.

    `program`: lowered from a plan with moves: it takes its far memory as a further argument.
    `ended`: called with the bytes that a step has moved.
    """

    def forward(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        step = FarStep(offload)
        try:
            raw, saved = program.forward(inputs, far=step)
        except BaseException:
            step.close()
            raise
        saved.append(step)  # which lives as long as the call awaits its backward
        return raw, saved

    def backward(saved: list[Any], *given: Any) -> Iterator[list[torch.Tensor]]:
        step = saved.pop()
        pieces = program.backward(saved, *given, far=step)
        try:
            yield from pieces
            ended(step.moved)
        finally:
            pieces.close()
            step.close()

    return dataclasses.replace(program, forward=forward, backward=backward)
