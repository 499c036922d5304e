"""Chains of layers with their backward, as the papers on checkpointing and offloading plan them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph


@dataclass(frozen=True)
class Layer:
    """Costs in seconds and the bytes of what a layer makes and of the gradient it receives."""

    forward_s: float
    backward_s: float
    size_bytes: int
    gradient_bytes: int


def chain_graph(layers: int) -> Graph:
    """Equal layers: each value 5 bytes, forward 1 s, backward 2 s."""
    return graph_of_layers([Layer(1.0, 2.0, 5, 1)] * layers)


def graph_of_layers(layers: Sequence[Layer]) -> Graph:
    """Layer i makes value i from value i-1; its backward reads both and the gradient of i."""
    values: list[Value] = []
    ops: list[Op] = []

    def add(size: int, cost: float, segment: int, *reads: int) -> int:
        values.append(Value(id=len(values), name=f"v{len(values)}", size_bytes=size))
        way = Alternative(reads=reads, writes=(len(values) - 1,), variants=(Variant(cost_s=cost),))
        ops.append(Op(id=len(ops), target="layer", alternatives=(way,), segment=segment))
        return len(values) - 1

    made: list[int] = []
    for layer in layers:
        made.append(add(layer.size_bytes, layer.forward_s, 0, *made[-1:]))
    gradient = None
    for number in range(len(layers) - 1, -1, -1):
        reads = [*made[max(0, number - 1) : number + 1], *([] if gradient is None else [gradient])]
        size = layers[number - 1].gradient_bytes if number else 0
        gradient = add(size, layers[number].backward_s, 1, *reads)
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    return validate_graph(Graph(values=tuple(values), ops=tuple(ops), segments=segments))
