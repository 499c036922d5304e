"""Eviction policies at many budgets: slowdown, or accesses, as in figures 2 and 7 to 12 of DTR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Literal

import msgspec

from tightfit.reporting.pictures.labels import Label
from tightfit.reporting.pictures.page import add_points
from tightfit.reporting.pictures.panels import Heading, Panel, panelled
from tightfit.reporting.pictures.scales import set_budgets
from tightfit.reporting.pictures.style import (
    BLACK,
    BLUE,
    BOUND,
    GREEN,
    ORANGE,
    OUR_LOOK,
    PALE,
    PURPLE,
    SKY_BLUE,
    VERMILLION,
    Look,
    sizes_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Measure = Literal["slowdown", "accesses"]

_NOTES: dict[Measure, str] = {
    "slowdown": "Time computed, as a multiple of the program's own, by budget.",
    "accesses": "Scores computed, and storages and classes looked at for them, by budget.",
}
_OURS = "improved"
_LOOKS = tuple(
    Look(colour, marker)
    for colour, marker in zip(
        (BLUE, GREEN, ORANGE, PURPLE, VERMILLION, SKY_BLUE, BLACK, GREEN, ORANGE),
        "osD^vPXph",
        strict=True,
    )
)


class PolicyCurve(msgspec.Struct, frozen=True):
    """The results of one policy at several budgets."""

    name: str  # of the policy
    ratios: tuple[float, ...]  # budgets as shares of the peak with nothing evicted, ascending
    # The quantity there; None where the program did not end
    values: tuple[float | None, ...]


def policies_picture(
    curves: Sequence[PolicyCurve],
    *,
    title: str,
    measure: Measure,
    constants_ratio: float,
    bottleneck_ratio: float,
    suffix: str = ".svg",
) -> bytes:
    """Return a picture of every policy's line, named next to its largest budget.

    `curves`: at least one. `constants_ratio`, `bottleneck_ratio`: shares of the peak of constants
    and of the largest single operator: no policy can go below.
    """
    sizes = sizes_of([curve.name for curve in curves])
    labels = [
        _label(curve, OUR_LOOK if curve.name == _OURS else look, sizes[curve.name])
        for curve, look in zip(curves, cycle(_LOOKS), strict=False)
    ]
    notes = [
        f"{_NOTES[measure]} A line stops where the program does not go through.",
        "Shaded: constants, and the largest single operator.",
    ]

    def draw(axes: Axes) -> None:
        _set_values(axes, curves, measure)
        set_budgets(axes, [0.0, *(ratio for curve in curves for ratio in curve.ratios)])
        axes.axvspan(0.0, bottleneck_ratio, color=BOUND, linewidth=0, zorder=1)
        axes.axvspan(0.0, constants_ratio, color=PALE, linewidth=0, zorder=1)
        for curve, label in zip(curves, labels, strict=True):
            _draw_curve(axes, curve, label)

    return panelled(
        [Panel(draw, labels)],
        Heading(title, notes),
        across="budget as a share of the peak with nothing evicted",
        height=260.0,
        suffix=suffix,
    )


def _found(curve: PolicyCurve) -> list[tuple[float, float]]:
    pairs = zip(curve.ratios, curve.values, strict=True)
    return [(ratio, value) for ratio, value in pairs if value is not None]


def _label(curve: PolicyCurve, look: Look, size: float) -> Label:
    places = _found(curve)
    if not places:
        return Label(f"{curve.name}: never", None, look, size, is_filled=False)
    return Label(curve.name, places[0], look, size)


def _set_values(axes: Axes, curves: Sequence[PolicyCurve], measure: Measure) -> None:
    values = [value for curve in curves for _, value in _found(curve)] or [1.0]
    if measure == "slowdown":
        axes.set_ylim(min(0.95, *values), max(1.5, 1.03 * max(values)))
        return
    axes.set_yscale("log")
    axes.set_ylim(max(0.5, 0.7 * min(values)), 2.0 * max(values))
    low, high = axes.get_ylim()
    ticks = [10.0**n for n in range(12) if low <= 10.0**n <= high]
    axes.set_yticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.minorticks_off()


def _draw_curve(axes: Axes, curve: PolicyCurve, label: Label) -> None:
    places = [
        (ratio, math.nan if value is None else value)
        for ratio, value in zip(curve.ratios, curve.values, strict=True)
    ]
    axes.plot(*zip(*places, strict=True), **label.look.line)
    add_points(axes, _found(curve), curve.name, **label.look.marks(label.marker_size))
