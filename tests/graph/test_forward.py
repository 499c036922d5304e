"""What every step holds, independent of its caller after the forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from support.graphs import training_graphs
from tightfit.graph.forward import forward_of, outputs_freed
from tightfit.graph.ir import Graph
from tightfit.plan.assemble import everything_kept
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Limits
from tightfit.planners.questions.minimum import proven_least_bytes

_BRIEFLY = Limits(seconds=1.0)


@pytest.mark.parametrize("sure", [forward_of, outputs_freed])
@settings(max_examples=25)
@given(graph=training_graphs())
def test_no_more_is_proven_than_of_all_that_the_caller_may_hold(
    sure: Callable[[Graph], Graph], graph: Graph
) -> None:
    proven_bytes = proven_least_bytes(sure(graph), "fresh", _BRIEFLY)
    assert proven_bytes <= proven_least_bytes(graph, "fresh", _BRIEFLY)
    assert proven_bytes <= simulate(graph, everything_kept(graph)).peak_bytes
