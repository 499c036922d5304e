"""The values of one step in far memory of any kind."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from tightfit.capture.calls.geometry import Geometry
from tightfit.execution.far.space import FarValue, Space
from tightfit.execution.lower import Program


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    # stored_bytes, loaded_bytes: to far memory, and back
    stored_bytes: int
    loaded_bytes: int
    far_bytes: int  # the most that is there at an instant
    stall_s: float  # how long operators wait for that


class FarStep(ABC):
    """The places of one step's values while they are away; a device's own way copies them.

    `close`: drops transfers in flight and gives far memory back; it may be called again.
    """

    close: Callable[[], Any]

    def __init__(self, space: Space) -> None:
        self._space = space
        self._away: dict[int, FarValue] = {}
        self._last: set[int] = set()  # values whose last load is in flight
        self._stored_bytes = self._loaded_bytes = 0

    def store(self, value: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        away = FarValue(self._space.take(storage.nbytes()), Geometry.of(tensor))
        self._away[value] = away
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._begin_store(value, content, away)
        self._stored_bytes += away.nbytes

    def load(self, value: int, *, is_last: bool = False) -> torch.Tensor:
        """Take memory for a value and begin to bring it back; it is not there before `wait`.

        `is_last`: whether nothing of it stays in far memory then.
        """
        away = self._away[value]
        content = torch.empty(away.nbytes, dtype=torch.uint8, device=away.geometry.device)
        self._begin_load(value, content, away)
        self._loaded_bytes += away.nbytes
        if is_last:
            self._last.add(value)
        return away.tensor(content)

    def wait(self, value: int) -> None:
        """Have operators wait until no transfer of a value is in flight.

        Raises `OffloadFailed` if it could not be copied.
        """
        self._arrive(value)
        if value in self._last:
            self._last.remove(value)
            self._space.give(self._away.pop(value).extents)

    def moved(self) -> Moved:
        return Moved(
            stored_bytes=self._stored_bytes,
            loaded_bytes=self._loaded_bytes,
            far_bytes=self._space.most_bytes,
            stall_s=self._stalled_s(),
        )

    @abstractmethod
    def _begin_store(self, value: int, content: torch.Tensor, away: FarValue) -> None:
        """Begin to copy the bytes of a value to their places."""

    @abstractmethod
    def _begin_load(self, value: int, content: torch.Tensor, away: FarValue) -> None:
        """Begin to copy bytes back from their places."""

    @abstractmethod
    def _arrive(self, value: int) -> None:
        """Have operators wait for the transfer of a value."""

    @abstractmethod
    def _stalled_s(self) -> float:
        """Return how long operators have waited, as far as that is known."""


def moving_program(
    program: Program,
    begin: Callable[[], FarStep],
    ended: Callable[[Callable[[], Moved]], None] = lambda moved: None,
) -> Program:
    """Return a program whose steps each have far memory.

    `program`: lowered from a plan with moves: it takes its far memory as a further argument.
    `begin`: returns the far memory of a new step. `ended`: called when a step has ended, with a
    function that returns what it has moved; on a GPU the time is known later.
    """

    def forward(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        step = begin()
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
