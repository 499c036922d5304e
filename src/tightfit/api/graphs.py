"""The graph of a model that is named, captured on fake tensors and priced by a model of costs."""

from __future__ import annotations

from tightfit.alternatives.registry import with_alternatives
from tightfit.api.target import load_example, loss_function, on_fake_tensors
from tightfit.capture.capture import capture
from tightfit.capture.joint import TracedCall
from tightfit.costs import with_costs
from tightfit.graph.ir import Graph
from tightfit.zoo.example import ImageSize

__all__ = ["graph_of_model"]


def graph_of_model(
    target: str,
    *,
    costs: str,
    batch: int | None = None,
    size: ImageSize | None = None,
    sequence: int | None = None,
    setting: str | None = None,
) -> Graph:
    """Return the graph of one step, loss inside, without running it or taking its memory.

    Parameters
    ----------
    target : str
        ``zoo:NAME``, ``package.module:factory`` or ``path/to/file.py:factory``.
    costs : str
        Modelled costs, such as ``"p100"``.
    batch, size, sequence, setting
        Passed to the factory; see `tightfit.api.target.load_example`.

    Raises
    ------
    BadInput
        If there is no such model or its factory fails.
    CaptureError
        If the step cannot be captured.
    """
    example = on_fake_tensors(
        lambda: load_example(target, batch=batch, size=size, sequence=sequence, setting=setting)
    )
    function, args, kwargs = loss_function(example)
    name = target.removeprefix("zoo:")
    captured = capture(TracedCall(function, {"model": example.model}, args, kwargs), name=name)
    return with_costs(with_alternatives(captured).graph, costs)
