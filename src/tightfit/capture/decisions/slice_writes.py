"""Writes to a slice of a tensor whose place is a number, such as a queue's pointer.

A trace cannot note the place of a slice that begins at a symbol. It can note rows that are counted
from there: the step is the same, wherever they are. The pointer itself is such a write, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.torch_private import core as private


@dataclass(frozen=True)
class Rows:
    """So many rows of a tensor."""

    dimension: int  # along which they follow each other
    begin: Any  # the first
    length: int  # how many there are
    is_row: bool = False  # whether it is named as one row, without that dimension

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write a value into these rows; it may have to be repeated, or be of another type.

        Raises `IndexError` if it is beyond the end, when the step runs.
        """
        shape = list(tensor.shape)
        shape[self.dimension : self.dimension + 1] = [] if self.is_row else [self.length]
        value = value.to(tensor.dtype).expand(shape)
        rows = torch.arange(self.length, device=tensor.device) + self.begin
        tensor.index_copy_(
            self.dimension, rows, value.unsqueeze(self.dimension) if self.is_row else value
        )


def rows_of(index: Any) -> Rows | None:
    """Return the rows that an index names; None: it names something else."""
    parts = index if isinstance(index, tuple) else (index,)
    named = [(d, part) for d, part in enumerate(parts) if not _is_everything(part)]
    if len(named) != 1:
        return None
    ((dimension, part),) = named
    if type(part) in (int, torch.SymInt):
        return Rows(dimension, part, 1, is_row=True)
    if not isinstance(part, slice) or part.step is not None:
        return None
    if not all(isinstance(end, int | torch.SymInt) for end in (part.start, part.stop)):
        return None
    length = part.stop - part.start
    if private.symbols_in(length) or int(length) <= 0:
        return None
    return Rows(dimension, part.start, int(length))


def _is_everything(part: Any) -> bool:
    return isinstance(part, slice) and part.start is part.stop is part.step is None


class Writes:
    """Counts the writes of a forward, and notes which of them take numbers.

    `placed`: the writes that are traced as if they took a number, whether they do or not.
    """

    def __init__(self, placed: Iterable[int] = ()) -> None:
        self.placed = set(placed)
        self.start()

    def start(self) -> None:
        self._asked_count = 0

    def take(self, tensor: Any, index: Any, value: Any) -> bool:
        """Write where a number says, or a number; return whether this was such a write."""
        number = self._asked_count
        self._asked_count += 1
        if not isinstance(tensor, torch.Tensor) or _is_differentiated(tensor, value):
            return False
        if isinstance(value, torch.Tensor):
            rows = rows_of(index) if value.device == tensor.device else None
            if rows is None or not self._is_taken(number, rows.begin):
                return False
            rows.write(tensor, value)
        elif isinstance(value, _NUMBERS) and _names_a_view(index) and self._is_taken(number, value):
            tensor[index].fill_(value)
        else:
            return False
        self.placed.add(number)
        return True

    def _is_taken(self, number: int, taken: Any) -> bool:
        """Whether a write takes a number of the step, or is traced as if it did."""
        return number in self.placed or bool(private.symbols_in(taken))


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def _is_differentiated(tensor: torch.Tensor, value: Any) -> bool:
    differs = isinstance(value, torch.Tensor) and value.requires_grad
    return torch.is_grad_enabled() and (tensor.requires_grad or differs)


def _names_a_view(index: Any) -> bool:
    """Whether an index selects a view of the tensor itself: plain numbers and slices."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is Ellipsis or type(part) is int or _is_plain(part) for part in parts)


def _is_plain(part: Any) -> bool:
    """Whether a part of an index is a slice whose ends are no symbols."""
    return isinstance(part, slice) and all(
        end is None or type(end) is int for end in (part.start, part.stop, part.step)
    )
