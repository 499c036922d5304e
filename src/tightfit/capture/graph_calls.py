"""Guards of a call of a handed graph, beyond those checked before it is handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.signature import input_signature, modes_and_settings, tensor_signature
from tightfit.capture.handed import GraphArguments, HandedGraphs
from tightfit.torch_private import core as private
from tightfit.torch_private.storages import shares_storage


class GraphCalls:
    """The signatures of calls of handed graphs.

    A graph is only called with the modules and modes of its first call: they are looked at once.
    Which inputs share memory, and whether casts are kept, is checked here and nowhere else.
    """

    def __init__(self, graphs: HandedGraphs) -> None:
        self._graphs = graphs
        self._around: dict[tuple[int, bool], Any] = {}

    def failed_guards(self, given: GraphArguments) -> str:
        """Return which guards failed when the graph of a call was made; "" if it was the first."""
        return self._graphs.graph(given.leaves[-1]).failed_guards

    def signature(self, given: GraphArguments) -> tuple[Any, Any]:
        """Return the signature of a call: inputs, then modes and members of modules."""
        graph = given.leaves[-1], private.autocast_nesting() > 0
        around = self._around.get(graph)
        if around is None:
            around = (*modes_and_settings(), *self._held(given.leaves))
            if self._is_guarded(given):
                self._around[graph] = around
        if shared := self._shared_with_members(given.leaves):
            around = (*around, shared)
        return input_signature(given.leaves, None), around  # inputs of graphs do not nest

    def _shared_with_members(self, leaves: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """Return which inputs share memory with which of the members that a graph takes."""
        tensors = ((i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
        several = [(i, private.storage_key(x)) for i, x in tensors if shares_storage(x)]
        if not several:
            return ()
        held = enumerate(self._graphs.held(leaves[-1]))
        places = {private.storage_key(t): place for place, t in held if t is not None}
        return tuple((i, places[key]) for i, key in several if key in places)

    def _held(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the signature of the tensors of modules, and which are the same tensor."""
        number = leaves[-1]
        tensors = self._graphs.held(number)
        places: dict[int, int] = {}
        shared = tuple(places.setdefault(id(t), i) for i, t in enumerate(tensors))
        given = tuple((i, places[id(x)]) for i, x in enumerate(leaves) if id(x) in places)
        flags = tuple(m.training for leaf in self._graphs.leaves(number) for m in leaf.modules())
        return tuple(map(_signature, tensors)), shared, given, flags

    def _is_guarded(self, given: GraphArguments) -> bool:
        """Whether the graph is called with these modules and modes only."""
        # a parameter that no module holds here may be a module's in another call
        is_foreign = any(isinstance(x, nn.Parameter) for x in given.leaves)
        return not is_foreign and not self._graphs.leaves(given.leaves[-1])

    def is_as_it_was(self, given: GraphArguments, signature: tuple[Any, Any]) -> bool:
        """Whether modes, and the tensors of modules, are as when a call had its signature."""
        return modes_and_settings() == signature[1][:2] and self._graphs.is_as_it_was(given)


def _signature(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor_signature(tensor)


def places_among(inputs: Sequence[Any], tensors: Sequence[Any]) -> tuple[int, ...]:
    """Return which inputs some tensors are; none if any of them is no input."""
    places = {id(x): place for place, x in enumerate(inputs)}
    return tuple(places[id(x)] for x in tensors) if places.keys() >= set(map(id, tensors)) else ()
