"""Calls of graphs that are handed over: each is run by a plan, or eagerly where there is none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tightfit.capture.calls.signature import modes_and_settings, tensor_signature
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import GraphArguments, HandedGraph, HandedGraphs
from tightfit.capture.stored import graph_key
from tightfit.dynamo.outside import Outside
from tightfit.errors import CaptureError, NothingToTrain, OpaqueVaries
from tightfit.session.callee import Callee


class RunsGraphs(Protocol):
    """Runs calls of graphs by plans."""

    def run_graph(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph.

        Raises `CaptureError` or `OpaqueVaries` if there is no plan for it; nothing has changed
        then.
        """

    def looking(self) -> AbstractContextManager[None]:
        """Return a context in which graphs are looked for: its work belongs to no step."""


class HandedCalls:
    """Calls of graphs that other code has made, such as `torch.compile`.

    `times_followed`: 0: that is another's matter.

    `callee`: whose modules hold parameters and buffers of the graphs. `graphs`: those that have
    been called. `outside`: frames that ran as plain Python.
    """

    def __init__(self, callee: Callee) -> None:
        self.name = callee.name
        self.graphs = HandedGraphs(callee.modules)
        self.outside = Outside(callee.name, callee.modules)
        self._runs: Callable[[], RunsGraphs | None] = lambda: None
        self._unplanned: weakref.WeakSet[HandedGraph] = weakref.WeakSet()
        self._first: dict[HandedGraph, HandedGraph] = {}  # of those that are the same
        self._by_key: dict[Any, HandedGraph] = {}
        self.times_followed = 0

    def call(self, given: Arguments, runs: weakref.ref[RunsGraphs]) -> Any:
        self._runs = runs
        return self._run_call(given)

    def _run_call(self, given: Arguments) -> Any:
        """Run a call of one graph, which is among its arguments."""
        graph, *inputs = given.args
        return self._called(graph, inputs)

    def asked(self, given: Arguments, asks: Callable[[GraphArguments], Any]) -> Any:
        """Ask something of the graph of a call, without running it."""
        graph, *inputs = given.args
        return asks(self.graphs.arguments(graph, inputs))

    def one_ops(self) -> list[str]:
        """Return the names of modules that run as one op without being marked."""
        return []

    def _called(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        runs = self._runs()
        graph = self._first.get(graph, graph)
        try:
            if runs is not None and graph not in self._first:
                graph = self._first_like(graph, inputs)
            if runs is None or graph in self._unplanned:
                return graph.run_as_it_is(*inputs)
            return graph.with_inputs(runs.run_graph(graph, inputs), inputs)
        except NothingToTrain:
            raise
        except (CaptureError, OpaqueVaries) as error:
            self._leave_out(graph, error)
        return graph.run_as_it_is(*inputs)

    def _first_like(self, graph: HandedGraph, inputs: Sequence[Any]) -> HandedGraph:
        """Return the first graph that runs the same as this graph.

        Dynamo makes a graph again where Python has changed that does not matter to it.
        """
        number = self.graphs.arguments(graph, inputs).args[-1]
        first = graph
        if not graph.leaf_calls:
            tensors = tuple(tensor_signature(x) for x in inputs if isinstance(x, torch.Tensor))
            around = modes_and_settings(), self._unguarded(), graph.called
            key = graph_key(self.graphs, number), tensors, around
            first = self._by_key.setdefault(key, graph)
        self._first[graph] = first
        return first

    def _unguarded(self) -> Any:
        """Return values that graphs depend on and that are not checked before hand-over."""
        return None

    def _leave_out(self, graph: HandedGraph, error: Exception) -> None:
        """Do without a plan of a graph from now on."""
        self.outside.left_alone(error)
        self._unplanned.add(graph)
