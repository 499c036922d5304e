"""Lifetimes of two layers, by hand; the peak on random graphs is in tests/plan."""

from __future__ import annotations

import pytest

from support.graphs import two_layers
from tightfit.errors import BadInput
from tightfit.graph.liveness import Lifetime, budget_of_ratio, lifetimes, producers, readers
from tightfit.graph.names import name_op, name_value

GRAPH = two_layers()
END = len(GRAPH.ops)


def test_values_live_from_their_op_to_their_last_reader() -> None:
    assert lifetimes(GRAPH) == (
        Lifetime(3, 0, 1),
        Lifetime(4, 1, 5),
        Lifetime(5, 2, END),  # returned
        Lifetime(6, 3, 4),  # the tangent
        Lifetime(7, 3, END),  # a gradient that stays
        Lifetime(8, 4, 5),
        Lifetime(9, 5, 6),
        Lifetime(10, 6, END),
    )
    accumulated = {life.value: life for life in lifetimes(GRAPH, gradients="accumulated")}
    assert accumulated[7] == Lifetime(7, 3, 3)


def test_who_makes_and_reads_a_value() -> None:
    assert producers(GRAPH)[9] == 5
    assert readers(GRAPH)[4] == (2, 3, 5)
    assert readers(GRAPH)[5] == ()


def test_names_for_people() -> None:
    made_by = producers(GRAPH)
    assert name_op(GRAPH.ops[1]) == "op 1 aten.relu in act"
    assert name_value(GRAPH, made_by, 4) == "value 4 ('relu' of act)"
    assert name_value(GRAPH, made_by, 0) == "value 0 (input 'x')"


def test_a_ratio_is_a_share_of_the_activation_peak() -> None:
    assert budget_of_ratio(GRAPH, 0.5) == 2100 + 1250
    for ratio in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="positive number"):
            budget_of_ratio(GRAPH, ratio)
