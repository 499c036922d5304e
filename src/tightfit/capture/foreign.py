"""A joint graph that another tracer made, as a graph for planners.

Inductor and torchtitan hand over one graph of a forward and its backward and ask which values of
the forward stay. Each operator has one way to run; operators that draw random numbers or write in
place are not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import SymInt, Tensor, fx

from tightfit.capture.flops import flops_of
from tightfit.capture.nodes import (
    base_of,
    flat_outputs,
    is_getitem,
    is_op,
    is_random,
    note_views,
    storage_bytes,
    writes_in_place,
)
from tightfit.errors import CaptureError
from tightfit.graph.ir import Alternative, Device, Graph, Op, Segment, Value, ValueId
from tightfit.graph.validate import validate_graph

_FORWARD, _BACKWARD = 0, 1


@dataclass(frozen=True)
class ForeignGraph:
    """The planner's graph, and which node of the foreign graph holds each value."""

    graph: Graph
    node_of: tuple[fx.Node, ...]

    def split(
        self, alive: frozenset[ValueId], backward: Sequence[fx.Node]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return values that a forward saves for its backward, and values recomputed from them.

        `alive`: the values that stay; inputs of the graph are always there.
        """
        kept = {self.node_of[value] for value in alive}
        own = set(backward)
        saved: list[fx.Node] = []
        again: list[fx.Node] = []
        seen: set[fx.Node] = set()
        waiting = [n for node in backward for n in node.all_input_nodes if n not in own]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op != "call_function" or node in kept:
                saved.append(node)
            else:
                again.append(node)
                waiting += node.all_input_nodes
        return saved, again


def lift_foreign(
    module: fx.GraphModule,
    is_backward: Callable[[fx.Node], bool],
    is_tangent: Callable[[fx.Node], bool],
    device: Device,
) -> ForeignGraph:
    """Return the planner's graph of a joint graph.

    `module`: its nodes carry fake tensors as ``meta["val"]``. It stays as it is. `is_backward`,
    `is_tangent`: whether an operator belongs to the backward, and an input is a gradient of an
    output. Raises `CaptureError` if sizes are symbols, since a plan in bytes needs numbers; if
    nothing is of a backward.
    """
    note_views(module.graph)
    return _Lifter(is_backward, is_tangent, device).run(module)


class _Lifter:
    def __init__(
        self,
        is_backward: Callable[[fx.Node], bool],
        is_tangent: Callable[[fx.Node], bool],
        device: Device,
    ) -> None:
        self.is_backward, self.is_tangent, self.device = is_backward, is_tangent, device
        self.values: list[Value] = []
        self.node_of: list[fx.Node] = []
        self.value_of: dict[fx.Node, ValueId] = {}

    def run(self, module: fx.GraphModule) -> ForeignGraph:
        nodes = list(module.graph.nodes)
        self._refuse_symbols(nodes)
        if not any(map(self.is_backward, nodes)):
            raise CaptureError(
                "no operator of the graph is known to belong to a backward: there is nothing to "
                "save values for. Way out: trace forward and backward into one graph"
            )
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                self._add_input(node)
        ops = [node for node in nodes if is_op(node)]
        for node in ops:
            self._add_outputs(node)
        self._note_outputs(nodes[-1])
        ordered = [node for node in ops if not self.is_backward(node)]
        ordered += [node for node in ops if self.is_backward(node)]
        graph = Graph(
            name="the compiled graph",
            values=tuple(self.values),
            ops=tuple(self._op(i, node) for i, node in enumerate(ordered)),
            segments=(Segment(_FORWARD, "forward"), Segment(_BACKWARD, "backward")),
            device=self.device,
            constants_bytes={"inputs": sum(v.size_bytes for v in self.values if v.is_constant)},
        )
        return ForeignGraph(validate_graph(graph), tuple(self.node_of))

    @staticmethod
    def _refuse_symbols(nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            sizes = [s for t in flat_outputs(node) if isinstance(t, Tensor) for s in t.shape]
            if any(isinstance(x, SymInt) for x in (*sizes, *flat_outputs(node))):
                raise CaptureError(
                    f"{node.name} has a size that is a symbol, and a plan in bytes needs numbers. "
                    "Way out: torch.compile(..., dynamic=False)"
                )

    def _add_value(self, node: fx.Node, size_bytes: int, **fields: object) -> None:
        value = Value(len(self.values), node.name, self.device.rounded(size_bytes), **fields)  # type: ignore[arg-type]
        self.value_of[node] = value.id
        self.values.append(value)
        self.node_of.append(node)

    def _add_input(self, node: fx.Node) -> None:
        size = sum(map(storage_bytes, flat_outputs(node)))
        if node.op == "placeholder" and self.is_tangent(node):
            self._add_value(node, size, role="tangent", segment=_BACKWARD)
        else:
            self._add_value(node, size, role="input")

    def _add_outputs(self, node: fx.Node) -> None:
        if not isinstance(node.meta.get("val"), tuple | list):
            if not writes_in_place(node):
                self._add_value(node, storage_bytes(node.meta.get("val")))
            return
        for user in node.users:
            if is_getitem(user) and user not in self.value_of:
                self._add_value(user, storage_bytes(user.meta.get("val")))

    def _note_outputs(self, output: fx.Node) -> None:
        """Note outputs: the forward's results are returned, the backward's are gradients."""
        for result in output.all_input_nodes:
            number = self._value(result)
            if number is None or self.values[number].role != "computed":
                continue
            value, made = self.values[number], self.node_of[number]
            maker = made.all_input_nodes[0] if is_getitem(made) else made
            fields = {"fate": "returned"}
            if self.is_backward(maker):
                fields = {"role": "gradient", "fate": "handed_over"}
            self.values[number] = Value(value.id, value.name, value.size_bytes, **fields)  # type: ignore[arg-type]

    def _value(self, node: fx.Node) -> ValueId | None:
        return self.value_of.get(base_of(node))

    def _op(self, number: int, node: fx.Node) -> Op:
        reads = dict.fromkeys(v for n in node.all_input_nodes if (v := self._value(n)) is not None)
        made = (node, *(user for user in node.users if is_getitem(user)))
        writes = dict.fromkeys(self.value_of[n] for n in made if n in self.value_of)
        pinned = None
        if is_random(node):
            pinned = "it draws random numbers"
        elif writes_in_place(node):
            pinned = "it writes in place"
        return Op(
            id=number,
            target=str(node.target),
            alternatives=(Alternative(tuple(reads), tuple(writes)),),
            segment=_BACKWARD if self.is_backward(node) else _FORWARD,
            pinned=pinned,
            flops=flops_of(node),
        )
