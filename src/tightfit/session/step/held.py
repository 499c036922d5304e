"""What a call was given, for as long as it may be run again."""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import Any

import torch

from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import GraphArguments

__all__ = ["GivenToCall"]


class GivenToCall:
    """What a call was given: held, or there as long as somebody else holds it.

    Parameters
    ----------
    given : Arguments
        Its arguments.
    """

    def __init__(self, given: Arguments) -> None:
        self._given: Arguments | None = given
        self._of_graph: _OfGraph | None = None

    def now(self) -> Arguments | None:
        """Return it; None if any of it has been let go of."""
        return self._given if self._of_graph is None else self._of_graph.now()

    def hold_only(self, leaves: Set[int]) -> None:
        """Hold only some of the flattened inputs of a graph from now on, and what is no tensor."""
        assert isinstance(self._given, GraphArguments)
        self._of_graph = _OfGraph(self._given, leaves)
        self._given = None

    def hold_all(self) -> None:
        """Hold all that is there."""
        if self._of_graph is not None and (given := self._of_graph.now()) is not None:
            self._given, self._of_graph = given, None


class _OfGraph:
    """The arguments of a call of a graph, most of them held by others.

    Parameters
    ----------
    given : GraphArguments
        The arguments.
    held : set of int
        Which of the flattened inputs this holds.
    """

    def __init__(self, given: GraphArguments, held: Set[int]) -> None:
        self._spec = given.spec
        places = {id(x): place for place, x in enumerate(given.inputs)}
        self._args = [places[id(x)] for x in given.args]
        own = {self._args[leaf] for leaf in held}
        self._held: dict[int, Any] = {}
        self._others: dict[int, weakref.ref[torch.Tensor]] = {}
        for place, x in enumerate(given.inputs):
            if isinstance(x, torch.Tensor) and place not in own:
                self._others[place] = weakref.ref(x)
            else:
                self._held[place] = x

    def now(self) -> GraphArguments | None:
        """Return the arguments; None if a tensor is gone."""
        found = self._held | {place: other() for place, other in self._others.items()}
        if any(found[place] is None for place in self._others):
            return None
        inputs = tuple(found[place] for place in range(len(found)))
        args = tuple(inputs[place] for place in self._args)
        return GraphArguments(args, {}, args, self._spec, inputs)
