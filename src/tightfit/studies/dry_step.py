"""A training step captured on fake tensors: nothing runs, and no memory is taken."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from tightfit.alternatives.registry import with_alternatives
from tightfit.capture.capture import capture
from tightfit.capture.captured import Captured
from tightfit.capture.traced_call import TracedCall
from tightfit.costs import refuse_unknown_costs, with_costs
from tightfit.dynamo.single_graph import graph_call
from tightfit.errors import BadInput
from tightfit.graph.ir import Exactness, Graph
from tightfit.plan.plan import Gradients
from tightfit.pricing.price import measured_costs
from tightfit.progress import SILENT, Progress, shown
from tightfit.session.memory.surroundings import root_gradient_bytes
from tightfit.studies.model import (
    ModelSettings,
    Target,
    load_example,
    loss_function,
    on_fake_tensors,
)
from tightfit.units import rounded_up

OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
"""Copies of the trainable parameters that an optimizer keeps."""


@dataclasses.dataclass(frozen=True)
class AllowedAlternatives:
    """Which alternatives of operators plans may use."""

    exactness: Exactness = "bitwise"  # the least exact class
    group: str = "all"  # a name of `tightfit.alternatives.registry.GROUPS`


DEFAULT_ALTERNATIVES = AllowedAlternatives()


def graph_of(target: Target, **options: Any) -> Graph:
    """Return the graph of a model's training step, captured on fake tensors and priced.

    Parameters and errors are those of `captured_step`.
    """
    return captured_step(target, **options).graph


def captured_step(
    target: Target,
    *,
    optimizer: str = "adamw",
    costs: str = "cpu",
    gradients: Gradients = "fresh",
    alternatives: AllowedAlternatives = DEFAULT_ALTERNATIVES,
    progress: Progress = SILENT,
    **model_options: Any,
) -> Captured:
    """Return a model's training step, captured on fake tensors, its graph priced.

    Parameters and errors are those of `check`; `model_options` are fields of `ModelSettings`.
    """
    if optimizer not in OPTIMIZERS:
        raise BadInput(f"no optimizer is called {optimizer!r} (known: {', '.join(OPTIMIZERS)})")
    refuse_unknown_costs(costs)
    with shown(progress, "capturing the step"):
        example = on_fake_tensors(lambda: load_example(target, ModelSettings(**model_options)))
        function, args, kwargs = loss_function(example)
        captured = _captured(
            TracedCall(function, {"model": example.model}, args, kwargs), alternatives
        )
    if costs == "measured":
        captured = measured_costs(captured, progress).captured
    else:
        captured = captured.with_graph(with_costs(captured.graph, costs))
    captured.joint.opaque.forget_examples()
    trainable = _trainable_bytes(example.model, captured.graph.device.granularity_bytes)
    graph = captured.graph.with_constants(
        gradients=trainable if gradients == "accumulated" else 0,
        optimizer_state=OPTIMIZERS[optimizer] * trainable,
        gradient_of_loss=root_gradient_bytes(captured),
    )
    return captured.with_graph(graph)


def _captured(call: TracedCall, alternatives: AllowedAlternatives) -> Captured:
    """Capture a step with alternatives; outputs returned with a loss receive no gradient."""
    name = call.function.__name__
    call = dataclasses.replace(call, loss_alone=True)
    captured = capture(graph_call(call, name), name=name)
    return with_alternatives(captured, alternatives.exactness, alternatives.group)


def _trainable_bytes(model: nn.Module, granularity: int) -> int:
    """Return the bytes of the parameters that require a gradient, as the allocator rounds."""
    sizes = (p.nbytes for p in model.parameters() if p.requires_grad)
    return sum(rounded_up(size, granularity) for size in sizes)
