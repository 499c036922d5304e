"""The graph of a training step: its values, ops and segments, and properties derived from them.

In: records, or a graph file. Out: a valid, frozen `Graph`; liveness, the fingerprint that plans
carry, and names for people. May import the foundation only, never torch.
"""

from tightfit.graph.ir import Alternative, Choice, Device, Graph, Op, Segment, Value, Variant
from tightfit.graph.validate import validate_graph

__all__ = [
    "Alternative",
    "Choice",
    "Device",
    "Graph",
    "Op",
    "Segment",
    "Value",
    "Variant",
    "validate_graph",
]
