"""Chains: no plan in the class of POFO's dynamic program is quicker than ours."""

from __future__ import annotations

import random

import pytest

from support.chains import Layer, graph_of_layers
from support.pofo import least_time_of_chain_s
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan import Far
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.registry import plan_with

LIMITS = Limits(iterations=8000, seconds=60)


def drawn_layers(seed: int, count: int) -> list[Layer]:
    """Layers whose costs and sizes have nothing to do with each other."""
    draw = random.Random(seed)
    return [
        Layer(
            forward_s=float(draw.randint(1, 4)),
            backward_s=float(draw.randint(1, 6)),
            size_bytes=draw.randint(2, 6),
            gradient_bytes=draw.randint(1, 3),
        )
        for _ in range(count)
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("speed", [0.5, 2.0])
@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_chains_take_no_longer_than_by_pofo(seed: int, share: float, speed: float) -> None:
    layers = drawn_layers(seed, 5)
    graph = graph_of_layers(layers)
    far = Far(capacity_bytes=1 << 20, store_bytes_per_s=speed, load_bytes_per_s=speed)
    least, _ = working_set_bytes(graph)
    budget = least + round(share * (eager_peak_bytes(graph) - least))
    outcome = plan_with("anytime", Task(graph=graph, budget_bytes=budget, far=far), LIMITS)
    plain_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    pofo_s = least_time_of_chain_s(layers, budget, far)
    assert plain_s * (1 + outcome.overhead) <= pofo_s + 1e-9
    assert plain_s * (1 + outcome.bound) <= pofo_s + 1e-6
