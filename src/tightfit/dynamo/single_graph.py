"""The only graph that Dynamo makes of a call, without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tightfit.capture.handed import HandedGraph, HandedGraphs
from tightfit.capture.traced_call import TracedCall
from tightfit.dynamo.backend import GraphCall
from tightfit.dynamo.compiled import Compiled, Following
from tightfit.dynamo.outside import Outside
from tightfit.errors import CaptureError, NothingToTrain


class GraphHandedOver(BaseException):
    """Ends a call that was only to hand over its graph; it holds the answer."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


def graph_call(call: TracedCall, name: str) -> TracedCall:
    """Return the call of the only graph of a callable; its tensors may be fake.

    Raises `NothingToTrain` if no output depends on a parameter that requires a gradient. Raises
    `CaptureError` if it is no single graph.
    """
    graphs = HandedGraphs(call.modules)

    def hand_over(graph: HandedGraph) -> GraphCall:
        def asked(inputs: Sequence[Any]) -> Any:
            refuse_break(graph)
            raise GraphHandedOver(graphs.arguments(graph, inputs).args)

        return asked

    follower = Following(call.modules, Outside(name, call.modules), _NoLimit())
    try:
        Compiled(call.function, name, hand_over, follower)(call.args, dict(call.kwargs))
    except GraphHandedOver as asked:
        return dataclasses.replace(call, function=graphs, args=asked.answer, kwargs={})
    raise without_graph(name, call.modules)


def refuse_break(graph: HandedGraph) -> None:
    """Refuse a graph behind which its callable goes on."""
    if graph.reason:
        first = graph.reason.strip().splitlines()[0]
        raise CaptureError(
            f"it is no single graph ({first}): its graphs are planned one by one when it is trained"
        )


def without_graph(name: str, modules: Mapping[str, nn.Module]) -> CaptureError:
    """Return an error that says why a callable has no graph to plan."""
    if any(p.is_meta for module in modules.values() for p in module.parameters()):
        return CaptureError(
            f"{name} is on the meta device, where there are only shapes: no step of it can be "
            "planned. Way out: use real parameters and inputs, or tightfit.check with a function "
            "that makes them, which needs no memory for them"
        )
    return NothingToTrain(
        f"{name} has no graph in which anything is trained: no output depends on a parameter that "
        "requires a gradient"
    )


class _NoLimit:
    """Nothing is limited: no memory is taken."""

    def lift_limit(self) -> None:
        """Do nothing."""

    def enforce(self) -> None:
        """Do nothing."""
