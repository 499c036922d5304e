"""Roofline costs (Williams et al., 2009): an op moves its bytes or does its operations.

``cost = max(traffic / bandwidth, operations / rate) + launch``, the rate being that of
convolutions or of matrix products; every other op is bound by memory.
"""

from __future__ import annotations

import msgspec

from tightfit.costs.machines import Machine
from tightfit.costs.variants import operator_name, price, traffic_bytes
from tightfit.graph.ir import CONSTANT_ROLES, Alternative, Device, Graph, Op
from tightfit.units import rounded_up

_MATRIX = ("mm", "bmm", "addmm", "addbmm", "addmv", "baddbmm", "mv", "linear", "_scaled_mm")


def with_roofline_costs(graph: Graph, machine: Machine, source: str) -> Graph:
    def cost(op: Op, alternative: Alternative) -> float:
        seconds = traffic_bytes(graph, op, alternative) / machine.bytes_per_s
        name, flops = operator_name(op.target), op.flops_of(alternative)
        if "conv" in name:
            seconds = max(seconds, flops / machine.convolution_flops_per_s)
        elif name in _MATRIX or "attention" in name:
            seconds = max(seconds, flops / machine.matrix_flops_per_s)
        return seconds + machine.launch_s

    return price(graph, cost, source)


def on_machine(graph: Graph, key: str, machine: Machine) -> Graph:
    """Return the graph as it would be on another machine: costs, sizes and device are its own.

    An estimate: kernels, workspaces and alternatives are still the captured device's.
    """
    device = Device(
        kind=key, granularity_bytes=machine.granularity_bytes, name=f"{machine.name} (modelled)"
    )
    moved = msgspec.structs.replace(rounded_to(graph, machine.granularity_bytes), device=device)
    return with_roofline_costs(moved, machine, f"roofline:{key} (estimate)")


def rounded_to(graph: Graph, granularity_bytes: int) -> Graph:
    """Return the graph with sizes rounded up to multiples of a coarser granularity.

    The constants grow as much as their values.
    """
    replace = msgspec.structs.replace
    constants = dict(graph.constants_bytes)
    values = list(graph.values)
    for position, value in enumerate(values):
        size = rounded_up(value.size_bytes, granularity_bytes)
        values[position] = replace(value, size_bytes=size)
        if value.is_constant:
            constants[CONSTANT_ROLES[value.role]] += size - value.size_bytes
    device = replace(graph.device, granularity_bytes=granularity_bytes)
    return replace(graph, values=tuple(values), constants_bytes=constants, device=device)
