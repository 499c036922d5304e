"""Several planners at several budgets: overhead against memory, as in Checkmate's figure 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tightfit.reporting.pictures.found import Found, Series, bounds_of, percents_of
from tightfit.reporting.pictures.labels import Label
from tightfit.reporting.pictures.page import PanelTitle, add_points
from tightfit.reporting.pictures.panels import Heading, Panel, panelled
from tightfit.reporting.pictures.regions import bound_label, draw_infeasible, shade_below_bound
from tightfit.reporting.pictures.scales import (
    PercentScale,
    percent_scale,
    set_budgets,
    set_percents,
)
from tightfit.reporting.pictures.style import (
    OUR_MARKER_SIZE,
    OURS,
    PALE,
    Look,
    families_of,
    looks_of,
    shown_name,
    sizes_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_IN_ONE_PANEL = 8


class _Line(msgspec.Struct, frozen=True):
    """One planner in a panel that names it."""

    name: str
    points: tuple[Found, ...]  # by budget, ascending
    label: Label


class _Members(msgspec.Struct, frozen=True):
    """Planners shown together."""

    title: PanelTitle
    lines: tuple[_Line, ...]


def comparison_picture(
    planners: Sequence[Series], *, title: str, budgets: str, suffix: str = ".svg"
) -> bytes:
    """Return a picture of overhead against the budget, every planner named next to its line.

    Up to eight planners share a panel. More have a panel per family, all with the same axes: the
    default planner in each, the other families pale behind.

    `budgets`: names the budgets, and their unit.
    """
    members = _members({series.name: series.ascending for series in planners})
    points = [point for series in planners for point in series.points]
    ours = next((series.points for series in planners if series.name == OURS), ())
    scale = percent_scale([*percents_of(points), *(bound for _, bound in bounds_of(ours))])

    def draw(axes: Axes, shown: _Members) -> None:
        set_percents(axes, scale)
        set_budgets(axes, [point.budget for point in points])
        shade_below_bound(axes, ours)
        names = [line.name for line in shown.lines]
        _draw_pale(axes, [series for series in planners if series.name not in names])
        for line in shown.lines:
            _draw_line(axes, line)
        draw_infeasible(axes, points)

    panels = [
        Panel(partial(draw, shown=shown), [line.label for line in shown.lines], shown.title)
        for shown in members
    ]
    first = msgspec.structs.replace(panels[0], labels=[*panels[0].labels, *bound_label(ours)])
    return panelled(
        [first, *panels[1:]],
        Heading(title, _notes(scale, is_split=len(panels) > 1)),
        across=budgets,
        height=220.0 if len(panels) == 1 else 150.0,
        columns=min(2, len(panels)),
        suffix=suffix,
    )


def _notes(scale: PercentScale, *, is_split: bool) -> list[str]:
    notes = [
        f"Extra compute{scale.note} at each budget. A line stops where its planner found no plan.",
        "Filled markers: proven optimal in the planner's own search space. "
        "Shaded: proven impossible.",
    ]
    if is_split:
        notes[1] += " Pale lines: the other panels."
    return notes


def _members(planners: dict[str, tuple[Found, ...]]) -> list[_Members]:
    if len(planners) <= _MOST_IN_ONE_PANEL:
        return [_Members(PanelTitle(), _lines(planners, list(planners)))]
    panels: list[_Members] = []
    for family in families_of(planners):
        members = [name for name in family.names if name in planners]
        if members:
            if OURS in planners and OURS not in members:
                members.append(OURS)
            lines = _lines(planners, members, family.prefix)
            panels.append(_Members(PanelTitle(family.title, family.colour), lines))
    return panels


def _lines(
    planners: dict[str, tuple[Found, ...]], members: Sequence[str], prefix: str = ""
) -> tuple[_Line, ...]:
    """The lines of a panel's members; ours first, so that the other lines are drawn over it."""
    looks = looks_of(planners)
    sizes = sizes_of([name for name in members if name != OURS]) | {OURS: OUR_MARKER_SIZE}
    lines: list[_Line] = []
    for name in sorted(members, key=lambda name: name != OURS):
        points = planners[name]
        text = shown_name(name).removeprefix(prefix)
        label = _label(text, points, looks[name], sizes[name])
        lines.append(_Line(name, points, label))
    return tuple(lines)


def _label(text: str, points: Sequence[Found], look: Look, marker_size: float) -> Label:
    """The name of a planner, next to its last plan."""
    found = [point for point in points if point.overhead is not None]
    if not found:
        reason = "refused" if {point.status for point in points} == {"refused"} else "no plan"
        return Label(f"{text}: {reason}", None, look, marker_size, is_filled=False)
    (end,) = _places(found[-1:])
    return Label(text, end, look, marker_size, is_filled=found[-1].status == "optimal")


def _places(points: Sequence[Found]) -> list[tuple[float, float]]:
    return [(point.budget, point.overhead_percent) for point in points]


def _draw_pale(axes: Axes, planners: Sequence[Series]) -> None:
    """All lines of other panels, as one line with gaps between them."""
    gap = (math.nan, math.nan)
    places = [place for series in planners for place in [*_places(series.ascending), gap]]
    if places:
        axes.plot(*zip(*places, strict=True), color=PALE, linewidth=0.8, zorder=2)


def _draw_line(axes: Axes, line: _Line) -> None:
    """A planner's line, and its markers: filled where the plan is proven optimal."""
    look, size = line.label.look, line.label.marker_size
    if line.points:
        axes.plot(*zip(*_places(line.points), strict=True), **look.line)
    found = [point for point in line.points if point.overhead is not None]
    for is_filled in (False, True):
        marked = [point for point in found if (point.status == "optimal") is is_filled]
        name = f"{line.name} {'optimal' if is_filled else 'found'}"
        add_points(axes, _places(marked), name, **look.marks(size, is_filled=is_filled))
