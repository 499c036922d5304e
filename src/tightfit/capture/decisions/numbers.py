"""Numbers that a forward reads and only computes with: inputs of the step, not decisions.

The length of a schedule, a factor that a buffer counts up to: such a number changes in every step,
and a plan for each would never run twice. While a step is traced it is a symbol. Operators on it go
into the graph; so do writes into the slice that it names (`slice_writes`). Code that asks for its
value fails, and the number is a decision then.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.capture.decisions.slice_writes import Writes
from tightfit.torch_private import core as private

_BATCH_NORMS = (torch.batch_norm, torch.nn.functional.batch_norm)
_MOMENTUM = 6  # its place among their arguments
_FIRST_MARK = 0.1
_MARK_STEP = 2.0**-40

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
# the tag keeps it in a trace although its result is not read
_LIBRARY.define(
    "carried(Tensor near, Scalar number, float mark) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_CARRIED = torch.ops.tightfit.carried.default


@torch.library.register_fake("tightfit::carried")
def _fake_carried(near: torch.Tensor, number: Any, mark: float) -> torch.Tensor:
    return near.new_empty(0)


def is_carried(node: torch.fx.Node) -> bool:
    """Whether a traced node says which number a mark means."""
    return node.target is _CARRIED


def number_carried(node: torch.fx.Node) -> tuple[Any, float]:
    """Return the number, or the node that computes it, and its mark."""
    _, number, mark = node.args
    return number, mark  # type: ignore[return-value]


class Numbers(TorchFunctionMode):
    """The numbers that a trace takes as inputs.

    Operators take their numbers as symbols, but for the momentum of batch norm, which has to be a
    plain number. A mark is its placeholder: a number that occurs nowhere else.

    `deciding`: numbers that decide which code runs, by the order in which they are asked for.
    `placed`: the writes that are traced as if a number placed them, whether it does or not.
    """

    def __init__(self, deciding: Container[int] = frozenset(), placed: Iterable[int] = ()) -> None:
        super().__init__()
        self.deciding = deciding
        self.writes = Writes(placed)
        self._order: dict[str, int] = {}  # by symbol
        self._marks = 0
        self.start()

    def start(self) -> None:
        """Start over: the tracer runs the forward several times."""
        self._asked = 0
        self._values: dict[int, float | int] = {}
        self.writes.start()

    def take(self, tensor: torch.Tensor, ask: Callable[[], Any], value: Any) -> Any:
        """Return the symbol of the next number that is asked for; None if that decides."""
        number = self._asked
        self._asked += 1
        if tensor.dtype is torch.bool or tensor.is_complex() or number in self.deciding:
            return None
        symbol = ask()
        for name in private.symbols_in(symbol):
            self._order[name] = number
        self._values[number] = value
        return symbol

    def value_of(self, names: Iterable[str]) -> float | int:
        """Return the number of this call that a symbol means."""
        (name,) = names
        return self._values[self._order[name]]

    def deciders(self, names: Iterable[str]) -> frozenset[int]:
        """Return the numbers of some symbols, and those asked for in one list with them.

        In a list of sizes each number decides, and each would end a trace of its own.
        """
        named = {self._order[name] for name in names if name in self._order}
        return frozenset(n for number in named for n in self._run_of_integers(number))

    def _run_of_integers(self, number: int) -> Iterator[int]:
        """Yield a number and, if it is whole, the whole ones asked for right before and after."""
        yield number
        for direction in (-1, 1):
            neighbour = number
            while isinstance(self._values.get(neighbour), int):
                yield neighbour
                neighbour += direction

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.__setitem__ and self.writes.take(*args):
            return None
        if func in _BATCH_NORMS:
            if len(args) > _MOMENTUM:
                args = (
                    *args[:_MOMENTUM],
                    self._marked(args[0], args[_MOMENTUM]),
                    *args[_MOMENTUM + 1 :],
                )
            elif "momentum" in kwargs:
                kwargs["momentum"] = self._marked(args[0], kwargs["momentum"])
        return func(*args, **kwargs)

    def _marked(self, near: torch.Tensor, number: Any) -> Any:
        """Return a plain number in the place of a symbol in the trace."""
        if not private.symbols_in(number):
            return number
        self._marks += 1
        mark = _FIRST_MARK + self._marks * _MARK_STEP
        _CARRIED(near, number, mark)
        return mark
