"""Sharded modules whose Python Dynamo follows: each graph of theirs is a planned call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tightfit.capture.calls.attributes import ReadAttributes
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import HandedGraph, HandedGraphs, ReadsUnseen
from tightfit.capture.stored import graph_key
from tightfit.dynamo.backend import GraphCall, HandOver
from tightfit.dynamo.compiled import Compiled, Following
from tightfit.session.parts.kinds import Part

__all__ = ["FollowedPart"]


class FollowedPart(Part):
    """A part of which Dynamo makes graphs; its function runs one of them.

    Parameters
    ----------
    name, module, alike, number
        As of `Part`.
    """

    def __init__(self, name: str, module: nn.Module, alike: int, number: int) -> None:
        self._graphs = HandedGraphs({"part": module})
        super().__init__(name, module, self._graphs, alike, number)
        self._keys: dict[int, Any] = {}

    def followed(
        self,
        function: Callable[..., Any],
        run: Callable[[Part, Arguments], Any],
        follower: Following,
    ) -> Compiled:
        """Return what runs the part through Dynamo.

        Parameters
        ----------
        function : callable
            The module's own forward.
        run : method
            Runs a call of one of the graphs.
        follower : Following
            Is asked and told while Dynamo follows the forward.
        """
        hand_over = _handing_over_to(weakref.ref(self), weakref.WeakMethod(run))
        return Compiled(function, self.name, hand_over, follower)

    def given(self, graph: HandedGraph, inputs: Sequence[Any]) -> Arguments:
        """Return what to call the part with for a call of a graph."""
        return self._graphs.arguments(graph, inputs)

    @property
    def reads(self) -> ReadAttributes:
        """What graphs read of the part's attributes: Dynamo guards that."""
        return ReadsUnseen().attributes(self.modules)

    def key(self, given: Arguments) -> Any:
        """Return what is the same of graphs that run the same on the same members."""
        number = given.args[-1]
        if number not in self._keys:
            self._keys[number] = graph_key(self._graphs, number)
        return self._keys[number]

    def is_like(self, other: Part) -> bool:
        """Whether a step captured of the other one is a step of this one: their keys say it."""
        return isinstance(other, FollowedPart)


def _handing_over_to(
    part: weakref.ref[FollowedPart], run: weakref.ref[Callable[[Part, Arguments], Any]]
) -> HandOver:
    """Return what takes graphs for a part; Dynamo keeps it, which must not keep the part alive."""

    def hand_over(graph: HandedGraph) -> GraphCall:
        def call(inputs: Sequence[Any]) -> Any:
            found, running = part(), run()
            if found is None or running is None:
                return graph.module(*inputs)
            return running(found, found.given(graph, inputs))

        return call

    return hand_over
