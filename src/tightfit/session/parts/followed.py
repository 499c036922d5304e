"""Parts of a step whose Python Dynamo follows: each graph of theirs is a planned call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.attributes import ReadAttributes
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import GraphArguments, HandedGraph, HandedGraphs, ReadsUnseen
from tightfit.capture.stored import graph_key
from tightfit.session.parts.kinds import Part

__all__ = ["FollowedPart"]


class FollowedPart(Part):
    """A part of which Dynamo makes graphs; its function runs one of them.

    Parameters
    ----------
    name, modules, alike, number
        As of `Part`.
    """

    def __init__(
        self, name: str, modules: Mapping[str, nn.Module], *, alike: int = 1, number: int = 0
    ) -> None:
        self._graphs = HandedGraphs(modules)
        super().__init__(name, modules, self._graphs, alike=alike, number=number)
        self._keys: dict[int, Any] = {}

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

    def needs_gradient(self, given: Arguments) -> bool:
        """Whether a call with these inputs can need a gradient."""
        assert isinstance(given, GraphArguments)
        tensors = (x for x in given.inputs if isinstance(x, torch.Tensor))
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    def is_like(self, other: Part) -> bool:
        """Whether a step captured of the other one is a step of this one: their keys say it."""
        return isinstance(other, FollowedPart)
