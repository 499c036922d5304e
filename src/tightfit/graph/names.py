"""How ops and values are named in messages and reports."""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.graph.ir import Graph, Op, OpId, ValueId


def name_op(op: Op) -> str:
    """Return such as ``"op 7 aten.relu in layer3.0.act"``."""
    return f"op {op.id} {op.target}" + (f" in {op.module}" if op.module else "")


def name_value(graph: Graph, producers: Mapping[ValueId, OpId], value: ValueId) -> str:
    """Return such as ``"value 9 ('relu' of layer3.0.act)"``.

    `producers`: the op that makes each value, from `tightfit.graph.liveness.producers`.
    """
    record = graph.values[value]
    if value not in producers:
        return f"value {value} ({record.role} {record.name!r})"
    return f"value {value} ({record.name!r} of {holder_module(graph, producers, value)})"


def holder_module(graph: Graph, producers: Mapping[ValueId, OpId], value: ValueId) -> str:
    """Return the module that makes a value; its operator if no module is known, else its role."""
    if value not in producers:
        role = graph.values[value].role
        return "gradients of the outputs" if role == "tangent" else role
    op = graph.ops[producers[value]]
    return op.module or op.target
