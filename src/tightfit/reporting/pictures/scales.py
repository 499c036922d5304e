"""The scale of an axis of percentages: linear, or logarithmic where values span decades."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import msgspec

from tightfit.reporting.pictures.style import QUIET

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPAN = 20.0
"""Values that differ more, as a ratio, are shown on a logarithmic scale."""
_DEEPEST = 1e4
"""Values smaller than the largest by more are in the linear part around zero."""
_LEAST = 1e-6
"""Percentages that differ less are the same."""
_MARGIN = 1.2
"""Room beyond the smallest and largest value on a logarithmic axis, as a factor."""
_TICKS, _MOST_TICKS = 5, 8
_ROOM, _TICK_WIDTH = 0.06, 20.0
"""Beyond the outermost values, as a share of their span, and the points between two ticks."""


class PercentScale(msgspec.Struct, frozen=True):
    """An axis of percentages."""

    # low, high: its ends
    low: float
    high: float
    ticks: tuple[float, ...]  # ascending
    # ``"linear"``; ``"log"``: every value is positive; ``"symlog"``: logarithmic beyond `linear_to`
    # on both sides of zero and linear between, so that zero has a place
    kind: Literal["linear", "log", "symlog"] = "linear"
    linear_to: float = 0.0  # for ``"symlog"``, a percentage

    @property
    def note(self) -> str:
        """A note for readers about the axis; empty if it is linear."""
        match self.kind:
            case "linear":
                return ""
            case "log":
                return " (logarithmic)"
            case "symlog":
                return f" (logarithmic, around zero to {self.linear_to:g} % linear)"


def percent_scale(values: Sequence[float]) -> PercentScale:
    """Return an axis that shows all values, and zero honestly; no ticks without values.

    `values`: percentages; may be negative.
    """
    if not values:
        return PercentScale(0.0, 1.0, ())
    high = max(values)
    positive = [value for value in values if value > max(high / _DEEPEST, _LEAST)]
    if not positive or high / min(positive) < _SPAN:
        return _linear([0.0, *values])
    if min(values) >= min(positive):
        return _log(min(positive), high)
    return _symlog(min([0.0, *values]), min(positive), high)


def _linear(values: Sequence[float]) -> PercentScale:
    low, high = min(values), max(values)
    if high - low < _LEAST:
        high = low + 1.0
    room = _ROOM * (high - low)
    ticks = round_numbers(low, high)
    return PercentScale(min(ticks[0], low - room), max(ticks[-1], high + room), ticks)


def round_numbers(low: float, high: float) -> tuple[float, ...]:
    """Return about six equally spaced round numbers that span two others."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(number * step, 12) for number in range(first, last + 1))


def _log(least: float, high: float) -> PercentScale:
    low, high = least / _MARGIN, high * _MARGIN
    return PercentScale(low=low, high=high, ticks=_decades(low, high), kind="log")


def _symlog(low: float, least: float, high: float) -> PercentScale:
    linear_to = 10.0 ** math.floor(math.log10(least))
    ticks = _decades(linear_to, high * _MARGIN)
    below = [-tick for tick in reversed(ticks) if tick <= -low]
    return PercentScale(
        low=low * _MARGIN,
        high=high * _MARGIN,
        ticks=(*below, 0.0, *ticks),
        kind="symlog",
        linear_to=linear_to,
    )


def _decades(low: float, high: float) -> tuple[float, ...]:
    """Round numbers between two positive ones, as many of a decade as there is room for."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        numbers = [round(factor * 10.0**power, 12) for power in powers for factor in factors]
        ticks = [number for number in numbers if low <= number <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    return tuple(ticks)


def set_percents(axes: Axes, scale: PercentScale) -> None:
    """Give a panel its vertical axis."""
    if scale.kind == "symlog":
        axes.set_yscale("symlog", linthresh=scale.linear_to, linscale=0.5)
    elif scale.kind == "log":
        axes.set_yscale("log")
    axes.set_ylim(scale.low, scale.high)
    axes.set_yticks(scale.ticks, [f"{tick:g} %" for tick in scale.ticks])
    axes.minorticks_off()
    if scale.low < 0:
        axes.axhline(0.0, color=QUIET, linewidth=0.8, zorder=1.5)


def set_budgets(axes: Axes, budgets: Sequence[float]) -> None:
    """Give a panel its horizontal axis, with ticks where plans were asked for, if they fit."""
    from matplotlib.ticker import MaxNLocator

    ticks = sorted(set(budgets))
    if not ticks:
        axes.set_xticks([])
        return
    room = _ROOM * ((ticks[-1] - ticks[0]) or abs(ticks[0]) or 1.0)
    axes.set_xlim(ticks[0] - room, ticks[-1] + room)
    at = [axes.transData.transform((tick, 1.0))[0] for tick in ticks]
    if all(after - before >= _TICK_WIDTH for before, after in pairwise(at)):
        axes.set_xticks(ticks, [f"{tick:.3g}" if tick < 1000 else f"{tick:.0f}" for tick in ticks])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
