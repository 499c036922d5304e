"""The graph of a training step: values, liveness, fingerprint, files. Never imports torch."""

from tightfit.graph.ir import (
    Alternative,
    Choice,
    Device,
    Graph,
    Op,
    Segment,
    Value,
    Variant,
)
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
