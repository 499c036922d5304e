"""Plans that are known of a step: the smallest, the thriftiest, and those of earlier costs."""

from __future__ import annotations

import msgspec

from support.graphs import two_layers
from tightfit.plan.assemble import everything_kept
from tightfit.plan.plan import Gradients, Plan
from tightfit.session.whole.known_plans import KnownPlans

GRAPH = two_layers()


def plan(budget_bytes: int, gradients: Gradients = "fresh") -> Plan:
    return msgspec.structs.replace(everything_kept(GRAPH, gradients), budget_bytes=budget_bytes)


def test_the_plan_of_the_smallest_budget_is_kept_for_each_kind_of_gradients() -> None:
    known = KnownPlans()
    for budget_bytes in (300, 100, 200):
        known.remember(plan(budget_bytes))
    known.remember(plan(400, "accumulated"))
    assert known.smallest("fresh") == plan(100)
    assert known.smallest("accumulated") == plan(400, "accumulated")
    assert {*known.all()} == {plan(100), plan(400, "accumulated")}


def test_plans_that_ran_by_earlier_costs_take_the_place_of_older() -> None:
    known = KnownPlans(earlier=[plan(500)])
    assert known.has_retired and known.all() == (plan(500),)
    known.retire([plan(300)])
    assert known.all() == (plan(300),)
    known.retire([])
    assert not known.has_retired


def test_with_further_alternatives_all_plans_are_of_earlier_costs() -> None:
    known = KnownPlans()
    known.remember(plan(200))
    known.remember_least_kept(plan(100))
    known.renumber_alternatives([plan(300)], GRAPH, GRAPH, GRAPH)
    assert known.smallest("fresh") is None
    assert [each.budget_bytes for each in known.all()] == [300, 200]
    least_kept = known.least_kept("fresh")
    assert least_kept is not None and least_kept.budget_bytes == 100
