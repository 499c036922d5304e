"""The backend that Dynamo calls with each graph: at its first call it is handed on, or runs
plainly.

Nothing is decided while Dynamo compiles, so errors reach the user as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tightfit.capture.handed import HandedGraph, stands_for_python
from tightfit.dynamo.rewritten import rewritten
from tightfit.errors import NothingToTrain
from tightfit.torch_private import dynamo as private
from tightfit.torch_private.frames.ends import break_reason
from tightfit.torch_private.frames.examples import example_of, free_histories, free_numbers
from tightfit.torch_private.frames.outermost import is_returned_with_loss
from tightfit.torch_private.frames.recompiled import why_recompiled
from tightfit.torch_private.traces import forget_real_tensors

GraphCall = Callable[[Sequence[Any]], Any]
"""Runs one call of a graph, given its inputs."""
HandOver = Callable[[HandedGraph], GraphCall]
"""Takes a graph whose first call is running."""


def handing_over_to(run: weakref.ref[Callable[[HandedGraph, Sequence[Any]], Any]]) -> HandOver:
    """Return a backend for a method; Dynamo keeps it, and must not keep its owner alive.

    `run`: runs one call of a graph. Once it is gone, graphs run as they are.
    """

    def hand_over(graph: HandedGraph) -> GraphCall:
        def call(inputs: Sequence[Any]) -> Any:
            found = run()
            return graph.run_as_it_is(*inputs) if found is None else found(graph, inputs)

        return call

    return hand_over


def backend_of(hand_over: HandOver) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    """Return a backend of Dynamo.

    `hand_over`: given a graph, returns a callable that runs it where a backward may follow.
    """

    def backend(module: fx.GraphModule, _: Sequence[Any]) -> DynamoGraph:
        trains = _may_train(module.graph) and not _is_on_meta(module.graph)
        return DynamoGraph(module, hand_over, trains=trains)

    return backend


class RunsEagerly(Exception):
    """Says of a graph that it runs as it is from now on: no plan of it would serve twice."""


class DynamoGraph:
    """One graph of Dynamo's.

    `module`: the graph; parameters and buffers are among its inputs. `hand_over`: as of
    `backend_of`. `trains`: whether a backward may follow a call of it.
    """

    def __init__(
        self, module: fx.GraphModule | HandedGraph, hand_over: HandOver, *, trains: bool
    ) -> None:
        self._made = module if isinstance(module, HandedGraph) else None
        graph = module.module if isinstance(module, HandedGraph) else module
        self._place = private.place_of_graph()
        self._failed_guards = why_recompiled()
        free_numbers(graph)
        self._module = private.without_hooks(graph)
        self._hand_over = hand_over
        self._calls_python = stands_for_python(graph.graph)
        self._planned: GraphCall | None = None
        self._is_plain = not trains
        self.trains = trains

    @property
    def handed(self) -> HandedGraph:
        """The graph as capture takes it."""
        if self._made is None:
            self._made = handed(self._module, self._place, self._failed_guards)
        return self._made

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph; as it is where no backward can follow."""
        if self._is_plain or not torch.is_grad_enabled():
            return self._run_as_it_is(*inputs)
        if self._planned is None:
            self._planned = self._hand_over(self.handed)
        try:
            return self._planned(inputs)
        except (NothingToTrain, RunsEagerly):
            self._is_plain = True
            return self._run_as_it_is(*inputs)

    def _run_as_it_is(self, *inputs: Any) -> Any:
        if self._calls_python:
            return self.handed.run_as_it_is(*inputs)
        return self._module(*inputs)


def handed(module: fx.GraphModule, place: str = "", failed_guards: str = "") -> HandedGraph:
    """Return a graph of Dynamo's, made of the code at a place, in the form of capture.

    `failed_guards`: of the graphs that were made of it before.
    """
    graph = rewritten(module)
    nodes = list(graph.graph.nodes)
    inputs = _inputs(graph.graph)
    made_in = ((node, private.module_of(node)) for node in nodes)
    returned_inputs = _returned_inputs(module.graph)
    forget_real_tensors(map(example_of, module.graph.nodes))
    for each in (module, graph):
        free_histories(each)
    return HandedGraph(
        module=private.without_hooks(graph),
        numbers=tuple(
            i for i, x in enumerate(inputs) if isinstance(x, torch.SymInt | torch.SymFloat)
        ),
        reason=break_reason(module),
        place=place,
        failed_guards=failed_guards,
        returned_with_loss=frozenset(
            i for i, node in _outputs(module.graph) if is_returned_with_loss(node)
        ),
        returned_inputs=returned_inputs,
        modules={node: inside for node, inside in made_in if inside is not None},
    )


def _returned_inputs(graph: fx.Graph) -> dict[int, int]:
    """Return which inputs are returned, by the outputs; operators in place return an input, too."""
    places = {id(x): i for i, x in enumerate(_inputs(graph)) if isinstance(x, torch.Tensor)}
    found = ((i, example_of(node)) for i, node in _outputs(graph))
    return {i: places[id(x)] for i, x in found if id(x) in places}


def _inputs(graph: fx.Graph) -> list[Any]:
    return [example_of(node) for node in graph.nodes if node.op == "placeholder"]


def _outputs(graph: fx.Graph) -> list[tuple[int, fx.Node]]:
    (returned,) = graph.output_node().args
    assert isinstance(returned, tuple | list)
    return [(i, node) for i, node in enumerate(returned) if isinstance(node, fx.Node)]


def _may_train(graph: fx.Graph) -> bool:
    """Whether an output of a graph, or an input that it changes, may need a gradient."""
    returned = {*graph.output_node().all_input_nodes}
    return any(
        _needs_gradient(node) and (node in returned or _is_written(node)) for node in graph.nodes
    )


def _is_on_meta(graph: fx.Graph) -> bool:
    """Whether an input of a graph is on the meta device: its ops take no memory."""
    return any(isinstance(x, torch.Tensor) and x.is_meta for x in _inputs(graph))


def _needs_gradient(node: fx.Node) -> bool:
    example = example_of(node)
    return isinstance(example, torch.Tensor) and example.requires_grad


def _is_written(node: fx.Node) -> bool:
    example = example_of(node)
    return node.op == "placeholder" and example is not None and example._version > 0
