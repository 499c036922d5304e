"""What a forward has read, as a guard: does a step captured then hold for what is there now?"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from tightfit.capture.calls.attributes import ReadAttributes
from tightfit.capture.reads.executed import Executed, is_library
from tightfit.capture.reads.names import Names, names_of
from tightfit.capture.reads.places import Place, TensorPlace, flattened
from tightfit.capture.reads.walk import Walk, imported
from tightfit.capture.side_effects.outside import OutsideTensors
from tightfit.errors import CaptureError

__all__ = ["Reads"]


class Reads:
    """All places that a forward can have read, and what they held when it was captured.

    Parameters
    ----------
    places : sequence of Place
        What was read.
    fetched : mapping of int to TensorPlace
        Where the outside tensors lie that are inputs of the plan, by their number.
    outside : OutsideTensors, optional
        Holds them for the plan.
    executed : Executed, optional
        What ran when it was captured.
    asks : bool
        Whether it may read attributes whose names no code shows.
    """

    def __init__(
        self,
        places: tuple[Place, ...] = (),
        fetched: Mapping[int, TensorPlace] | None = None,
        outside: OutsideTensors | None = None,
        executed: Executed | None = None,
        asks: bool = False,
    ) -> None:
        self._places = flattened(places)
        self._fetched = dict(fetched or {})
        self._outside = outside
        self._executed = executed or Executed()
        self._asks = asks

    @classmethod
    def of(
        cls,
        executed: Executed,
        function: Any,
        modules: Mapping[str, nn.Module],
        given: tuple[Any, ...] = (),
        *,
        opaque: frozenset[nn.Module] = frozenset(),
        outside: OutsideTensors | None = None,
        unread: frozenset[tuple[int, Any]] = frozenset(),
    ) -> Reads:
        """Find what a call can have read.

        Parameters
        ----------
        executed : Executed
            What it ran.
        function, modules, given
            What was called, the modules it uses, its arguments, functions among them.
        opaque : frozenset of nn.Module
            Modules that run eagerly in every step.
        outside : OutsideTensors, optional
            The tensors that belong to nobody and are inputs of the plan.
        unread : frozenset of (int, object)
            By id of a dict or list, and key: what it writes before it reads it.

        Raises
        ------
        CaptureError
            If it reads what cannot be watched; names that.
        """
        _refuse_impure(executed)
        names = Names.of_all(names_of(code) for code, _ in executed.codes)
        inputs = outside.numbers if outside is not None else {}
        walk = Walk(executed, names, modules, opaque, inputs, unread)
        for code, held in executed.codes:
            walk.globals(held, names_of(code).globals)
        for held, taken in imported(names.imports):
            walk.globals(held, taken)
        if executed.reads_environment:
            walk.through([(vars(os.environ).get("_data"), "os.environ")])
        for prefix, top in modules.items():
            within = [m for block in opaque for m in block.modules()]
            walk.through(
                (module, f"{prefix}.{name}".rstrip("."))
                for name, module in top.named_modules()
                if module not in within
            )
        walk.through([(function, "the forward")])
        walk.through((value, "an argument") for value in given if callable(value))
        return cls(tuple(walk.places), walk.fetched, outside, executed, walk.asks)

    def of_another(self, function: Any, modules: Mapping[str, nn.Module]) -> Reads:
        """Return what a module that is like the one captured reads: the same, in its own places."""
        return Reads.of(self._executed, function, modules, outside=self._outside)

    def attributes(self, modules: Mapping[str, nn.Module]) -> ReadAttributes | None:
        """Return which attributes of modules of the user's classes can have been read.

        Returns
        -------
        ReadAttributes or None
            None: any, since the user's code asks for names that it does not show.
        """
        codes = [code for code, _ in self._executed.codes]
        own = [code for code in codes if not is_library(code.co_filename)]
        if self._asks or any(names_of(code).whole for code in own):
            return None
        names = Names.of_all(map(names_of, codes)).attributes
        kinds = {type(module) for top in modules.values() for module in top.modules()}
        return ReadAttributes(names, frozenset(kind for kind in kinds if _is_own(kind)))

    def __len__(self) -> int:
        """Return how many places are compared."""
        return len(self._places)

    def hold(self) -> bool:
        """Whether the same is there now."""
        return all(place.holds() for place in self._places)

    def change(self) -> str | None:
        """Say what is not as it was, if anything is."""
        for place in self._places:
            if not place.holds():
                return place.change()
        return None

    def held(self) -> tuple[Any, ...]:
        """Return what was in all those places when it was captured."""
        return tuple(place.held() for place in self._places)

    def fetch(self) -> None:
        """Give the plan the outside tensors that lie in their places now."""
        for number, place in self._fetched.items():
            assert self._outside is not None
            self._outside.take(number, place.fetch())


def _is_own(kind: type) -> bool:
    """Whether a class of modules is the user's, and derives from no library's but `nn.Module`."""
    bases = (base for base in kind.__mro__ if base not in nn.Module.__mro__)
    return not any(is_library(_file_of(base)) for base in bases)


def _file_of(kind: type) -> str | None:
    """Return the file of a class's module; in a notebook, say, what its methods' code names."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    codes = (getattr(member, "__code__", None) for member in vars(kind).values())
    return file or next((code.co_filename for code in codes if code is not None), None)


def _refuse_impure(executed: Executed) -> None:
    for code, name in executed.impure:
        where = getattr(code, "co_qualname", code.co_name)
        raise CaptureError(
            f"{where} ({code.co_filename}:{code.co_firstlineno}) calls {name}(): a planned step "
            "replays operators, not Python, and would use the same answer each time. Way out: "
            "pass the answer as an argument, call it outside the fitted module, or mark the "
            "module with tightfit.opaque",
            cause="impure",
        )
