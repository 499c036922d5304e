"""Regions without plans: below proven bounds, and at budgets that are proven too small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tightfit.reporting.pictures.found import Found, bounds_of
from tightfit.reporting.pictures.labels import Label
from tightfit.reporting.pictures.page import add_points
from tightfit.reporting.pictures.style import BOUND, INK, PALE, QUIET, SMALL_SIZE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def bound_label(points: Sequence[Found]) -> list[Label]:
    """Return the name of the bound, at its value for the largest budget; none without a bound."""
    bounds = bounds_of(points)
    return [Label("proven lower bound", bounds[-1])] if bounds else []


def shade_below_bound(axes: Axes, points: Sequence[Found]) -> None:
    """Shade the region that a proven bound excludes.

    A bound holds for every smaller budget and says nothing about larger budgets: stairs.
    """
    bounds = bounds_of(points)
    if bounds:
        (left, _), (low, _) = axes.get_xlim(), axes.get_ylim()
        x, y = zip((left, bounds[0][1]), *bounds, strict=True)
        axes.fill_between(x, low, y, step="pre", color=BOUND, linewidth=0, zorder=1)


def draw_infeasible(axes: Axes, points: Sequence[Found]) -> None:
    """Hatch the budgets that are proven to have no plan; cross the budgets that were tried.

    No plan at a budget means none at a smaller budget.
    """
    tried = sorted({point.budget for point in points if point.status == "infeasible"})
    if tried:
        left, _ = axes.get_xlim()
        _hatch(axes, left, tried[-1], "////", "no plan exists (proven)")
        _cross(axes, tried, "infeasible", INK)


def draw_not_found(axes: Axes, points: Sequence[Found]) -> None:
    """Dot the budgets at which no plan was found although none is excluded; cross them."""
    proven = [point.budget for point in points if point.status == "infeasible"]
    open_from = max(proven, default=0.0)
    tried = sorted({p.budget for p in points if p.overhead is None and p.budget > open_from})
    if tried:
        left, _ = axes.get_xlim()
        _hatch(axes, max([left, *proven]), tried[-1], "....", "no plan found")
        _cross(axes, tried, "not found", QUIET)


def _hatch(axes: Axes, left: float, right: float, hatch: str, name: str) -> None:
    axes.axvspan(left, right, facecolor="white", edgecolor=PALE, linewidth=0, hatch=hatch, zorder=2)
    axes.text(
        (left + right) / 2,
        0.5,
        name,
        transform=axes.get_xaxis_transform(),
        rotation=90,
        ha="center",
        va="center",
        fontsize=SMALL_SIZE,
        bbox={"facecolor": "white", "linewidth": 0, "pad": 1.5},
        zorder=2.5,
    )


def _cross(axes: Axes, budgets: Sequence[float], name: str, colour: str) -> None:
    """Crosses at the upper edge: no plan costs infinitely much."""
    add_points(
        axes,
        [(budget, 1.0) for budget in budgets],
        name,
        transform=axes.get_xaxis_transform(),
        linestyle="none",
        marker="x",
        markersize=6,
        markeredgewidth=1.6,
        color=colour,
        clip_on=False,
        zorder=6,
    )
