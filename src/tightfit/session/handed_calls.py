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


class GraphRunner(Protocol):
    """Runs graphs by plans."""

    def run_graph(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph.

        Raises `CaptureError` or `OpaqueVaries` if there is no plan for it; nothing has changed
        then.
        """

    def unmeasured(self) -> AbstractContextManager[None]:
        """Return a context whose memory belongs to no step, such as that of following Python."""


class HandedCalls:
    """Calls of graphs that other code has made, such as `torch.compile`.

    `callee`: its modules hold the parameters and buffers of the graphs. `graphs`: those that have
    been called. `outside`: frames that ran as plain Python. `times_followed`: 0: Dynamo follows
    none of its frames here.
    """

    def __init__(self, callee: Callee) -> None:
        self.name = callee.name
        self.graphs = HandedGraphs(callee.modules)
        self.outside = Outside(callee.name, callee.modules)
        self._runner: Callable[[], GraphRunner | None] = lambda: None
        self._unplanned: weakref.WeakSet[HandedGraph] = weakref.WeakSet()
        self._first: dict[HandedGraph, HandedGraph] = {}  # of those that are the same
        self._by_key: dict[Any, HandedGraph] = {}
        self.times_followed = 0

    def call(self, given: Arguments, runner: weakref.ref[GraphRunner]) -> Any:
        self._runner = runner
        return self._run_call(given)

    def _run_call(self, given: Arguments) -> Any:
        """Run a call whose first argument is its graph."""
        graph, *inputs = given.args
        return self._called(graph, inputs)

    def inspect(self, given: Arguments, function: Callable[[GraphArguments], Any]) -> Any:
        """Return the value of a function of the graph of a call, which does not run."""
        graph, *inputs = given.args
        return function(self.graphs.arguments(graph, inputs))

    def one_ops(self) -> list[str]:
        """Return the names of modules that run as one op without being marked."""
        return []

    def _called(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        runner = self._runner()
        graph = self._first.get(graph, graph)
        try:
            if runner is not None and graph not in self._first:
                graph = self._first_like(graph, inputs)
            if runner is None or graph in self._unplanned:
                return graph.run_as_it_is(*inputs)
            return graph.with_inputs(runner.run_graph(graph, inputs), inputs)
        except NothingToTrain:
            raise
        except (CaptureError, OpaqueVaries) as error:
            self._leave_out(graph, error)
        return graph.run_as_it_is(*inputs)

    def _first_like(self, graph: HandedGraph, inputs: Sequence[Any]) -> HandedGraph:
        """Return the first graph that computes the same.

        Dynamo makes a graph again also where the Python that has changed does not matter to it.
        """
        number = self.graphs.arguments(graph, inputs).args[-1]
        first = graph
        if not graph.leaf_calls:
            tensors = tuple(tensor_signature(x) for x in inputs if isinstance(x, torch.Tensor))
            state = modes_and_settings(), self._unguarded(), graph.called
            key = graph_key(self.graphs, number), tensors, state
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
