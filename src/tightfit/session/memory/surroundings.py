"""What lies around a step now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightfit.capture.captured import Captured

if TYPE_CHECKING:
    pass


__all__ = ["assumed_outside_bytes", "root_gradient_bytes"]


def assumed_outside_bytes(captured: Captured) -> int:
    """Assume what a loss outside the plan holds until it is measured: three times the outputs."""
    tangents = [v for v in captured.graph.values if v.role == "tangent"]
    return 3 * sum(v.size_bytes for v in tangents)


def root_gradient_bytes(captured: Captured) -> int:
    """Return the bytes of the losses' own gradients: `backward` holds them until it returns."""
    granularity = captured.graph.device.granularity_bytes
    tangents = (v for v in captured.graph.values if v.role == "tangent")
    return sum(v.size_bytes for v in tangents if v.size_bytes <= granularity)
