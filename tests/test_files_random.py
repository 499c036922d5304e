"""Damaged graph and plan files give our errors or something valid; they never crash."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.graphs import two_layers
from tightfit.errors import TightfitError
from tightfit.graph.io import graph_from_json, graph_to_json
from tightfit.plan import Plan, assemble, keep_everything, simulate, verify
from tightfit.plan.io import plan_from_json, plan_to_json

GRAPH = two_layers()
PLAN: Plan = assemble(GRAPH, keep_everything(GRAPH), budget_bytes=1 << 40, gradients="fresh")

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 80]),
    st.floats(),
    st.text(max_size=4),
    st.just([]),
    st.just({}),
)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything in a document."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return found


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    if draw(st.booleans()):  # cut or changed as text
        text = bytearray(content)
        for _ in range(draw(st.integers(1, 3))):
            text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
        return bytes(text[: draw(st.integers(0, len(text)))])
    document = json.loads(content)
    for _ in range(draw(st.integers(1, 3))):
        candidates = places(document)
        if not candidates:
            break
        container, key = candidates[draw(st.integers(0, len(candidates) - 1))]
        if draw(st.booleans()):
            container[key] = draw(_SCALARS)
        elif isinstance(container, list):
            container.insert(key, container[draw(st.integers(0, len(container) - 1))])
        else:
            del container[key]
    return json.dumps(document).encode()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(damaged(graph_to_json(GRAPH)))
def test_a_damaged_graph(content: bytes) -> None:
    try:
        graph = graph_from_json(content)
        plan = assemble(graph, keep_everything(graph), budget_bytes=1 << 40, gradients="fresh")
        verify(plan, graph)
    except TightfitError:
        return
    assert simulate(graph, plan).peak_bytes >= 0


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(damaged(plan_to_json(PLAN)))
def test_a_damaged_plan(content: bytes) -> None:
    try:
        plan = plan_from_json(content)
        verify(plan, GRAPH)
    except TightfitError:
        return
    assert simulate(GRAPH, plan).peak_bytes <= plan.budget_bytes
