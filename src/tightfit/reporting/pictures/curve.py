"""One planner at many budgets: the overhead of its plans, and the proven bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tightfit.reporting.pictures.found import Found, bounds_of, percents_of
from tightfit.reporting.pictures.labels import Label
from tightfit.reporting.pictures.page import add_points
from tightfit.reporting.pictures.panels import Heading, Panel, panelled
from tightfit.reporting.pictures.regions import (
    bound_label,
    draw_infeasible,
    draw_not_found,
    shade_below_bound,
)
from tightfit.reporting.pictures.scales import percent_scale, set_budgets, set_percents
from tightfit.reporting.pictures.style import OUR_LOOK, OUR_MARKER_SIZE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_Plans = Mapping[bool, Sequence[tuple[float, float]]]
"""Budgets and percentages of plans, by whether they are proven optimal."""


def curve_picture(
    points: Sequence[Found], *, title: str, budgets: str, suffix: str = ".svg"
) -> bytes:
    """Return a picture of overhead and proven bound against the budget, as stairs.

    A plan serves every larger budget, a bound holds for every smaller one; nothing is drawn that
    follows from neither.

    `points`: plan and bound at each budget. `budgets`: names the budgets, and their unit.
    """
    points = sorted(points, key=lambda point: point.budget)
    scale = percent_scale([*percents_of(points), *(bound for _, bound in bounds_of(points))])
    plans = {
        is_optimal: [
            (point.budget, point.overhead_percent)
            for point in points
            if point.overhead is not None and (point.status == "optimal") is is_optimal
        ]
        for is_optimal in (False, True)
    }
    notes = [
        f"Extra compute{scale.note}: the cost of a plan at its budget, and at larger budgets until "
        "a cheaper plan fits.",
        "Filled markers: proven optimal. Shaded: proven impossible.",
    ]
    labels = [*_plan_label(plans), *bound_label(points)]

    def draw(axes: Axes) -> None:
        set_percents(axes, scale)
        set_budgets(axes, [point.budget for point in points])
        shade_below_bound(axes, points)
        draw_infeasible(axes, points)
        draw_not_found(axes, points)
        _draw_plans(axes, plans)

    panels, heading = [Panel(draw, labels)], Heading(title, notes)
    return panelled(panels, heading, across=budgets, height=220.0, suffix=suffix)


def _plan_label(plans: _Plans) -> list[Label]:
    """The name of the plans, next to the plan of the largest budget; none without a plan."""
    ends = [(*place, is_optimal) for is_optimal, places in plans.items() for place in places]
    if not ends:
        return []
    budget, height, is_optimal = max(ends)
    return [Label("plan", (budget, height), OUR_LOOK, OUR_MARKER_SIZE, is_optimal)]


def _draw_plans(axes: Axes, plans: _Plans) -> None:
    stairs = sorted(place for places in plans.values() for place in places)
    if stairs:
        _, right = axes.get_xlim()
        stairs.append((right, stairs[-1][1]))
        axes.plot(*zip(*stairs, strict=True), drawstyle="steps-post", **OUR_LOOK.line)
    for is_optimal, places in plans.items():
        name = f"plan {'optimal' if is_optimal else 'found'}"
        add_points(axes, places, name, **OUR_LOOK.marks(OUR_MARKER_SIZE, is_filled=is_optimal))
