"""A call run again under autograd on tensors in place of those that it makes on its way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from tightfit.torch_private.tracing import trees

_Place: TypeAlias = tuple[int, int]
"""Which function of PyTorch makes a tensor, counted from the first, and which of its results."""

_Run: TypeAlias = Callable[[AbstractContextManager[Any]], Mapping[int, torch.Tensor]]
"""Runs a call under autograd, its functions within a context; returns its raw outputs."""


@dataclass(frozen=True)
class Made:
    """Raw outputs of a call that ran on some of them.

    `outputs`: as the call has made them itself. `replaced`: those whose places others have taken.
    """

    outputs: Mapping[int, torch.Tensor]
    replaced: Mapping[int, torch.Tensor]


class MadeAgain:
    """Runs a call again, with its own outputs in the places where it makes these.

    All else that the call computes from them is a function of the outputs that the caller has.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}  # where the call makes outputs, as far as known

    def ran(self, run: _Run, given: Mapping[int, torch.Tensor]) -> Made | None:
        """Return what a call makes that runs on some of its outputs; None: it makes them unseen."""
        if not given.keys() <= self._places.keys():
            self._find(run, given)
        if not given.keys() <= self._places.keys():
            return None
        mode = _Replacing({self._places[i]: x for i, x in given.items()})
        made = run(mode)
        if any(made[i] is not x for i, x in given.items()):
            return None
        replaced = {i: mode.replaced[self._places[i]] for i in given}
        return Made({**made, **replaced}, replaced)

    def _find(self, run: _Run, given: Mapping[int, torch.Tensor]) -> None:
        """Find where the call makes outputs; nothing is saved for a backward."""
        mode = _Noting()
        made = run(_saving_nothing(mode))
        places = {i: mode.place_of(made[i]) for i in given if i in made}
        self._places |= {i: place for i, place in places.items() if place is not None}


@contextmanager
def _saving_nothing(mode: TorchFunctionMode) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: None, _nothing_saved), mode:
        yield


def _nothing_saved(saved: None) -> torch.Tensor:
    raise AssertionError("nothing goes back through this run")


class _Counting(TorchFunctionMode):
    """Sees each result of each function of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls += 1
        if isinstance(result, torch.Tensor):
            return self._seen(result, 0)
        numbers = count()

        def seen(leaf: Any) -> Any:
            return self._seen(leaf, next(numbers)) if isinstance(leaf, torch.Tensor) else leaf

        return trees.tree_map(seen, result) if isinstance(result, tuple | list) else result

    def _seen(self, result: torch.Tensor, number: int) -> torch.Tensor:
        """Return what takes the place of a result."""
        raise NotImplementedError


class _Noting(_Counting):
    """Notes which function has made a tensor; one that returns it unchanged has not."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], Any, _Place]] = {}

    def place_of(self, tensor: torch.Tensor) -> _Place | None:
        """Return where a tensor was made; None: not seen, as in an autograd Function of the user.

        There it gets its history later on.
        """
        known, node, place = self._found.get(id(tensor), (None, None, None))
        is_made = known is not None and known() is tensor
        return place if is_made and node is not None and node is tensor.grad_fn else None

    def _seen(self, result: torch.Tensor, number: int) -> torch.Tensor:
        known = self._found.get(id(result))
        if known is None or known[0]() is not result or known[1] is not result.grad_fn:
            place = self._calls, number
            self._found[id(result)] = weakref.ref(result), result.grad_fn, place
        return result


class _Replacing(_Counting):
    """Replaces results of functions by tensors that are like them."""

    def __init__(self, given: Mapping[_Place, torch.Tensor]) -> None:
        super().__init__()
        self._given = given
        self.replaced: dict[_Place, torch.Tensor] = {}

    def _seen(self, result: torch.Tensor, number: int) -> torch.Tensor:
        place = self._calls, number
        other = self._given.get(place)
        if (
            result.grad_fn is None
            or other is None
            or (other.shape, other.dtype) != (result.shape, result.dtype)
        ):
            return result
        self.replaced[place] = result
        return other
