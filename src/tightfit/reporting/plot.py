"""Line plots as SVG text, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

__all__ = ["Curve", "line_plot"]

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 210, 40, 56
_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
)


class Curve(msgspec.Struct, frozen=True):
    """A named series of points, drawn in order; dashed for bounds."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


def line_plot(
    curves: Sequence[Curve], *, title: str, x_label: str, y_label: str, markers: bool = True
) -> str:
    """Return an SVG document with one line and legend entry per curve.

    Parameters
    ----------
    curves : sequence of Curve
        Finite points; curves without points are left out.
    title, x_label, y_label : str
        Texts.
    markers : bool
        Mark the points; dashed curves are never marked.
    """
    drawn = [curve for curve in curves if curve.points]
    points = [point for curve in drawn for point in curve.points]
    x_ticks = _ticks([x for x, _ in points] or [0.0, 1.0], from_zero=False)
    y_ticks = _ticks([y for _, y in points] or [0.0, 1.0], from_zero=True)
    frame = _Frame(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
        *_axes(frame, x_ticks, y_ticks, x_label, y_label),
    ]
    for number, curve in enumerate(drawn):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.extend(_line(frame, curve, colour))
        if markers and not curve.dashed:
            parts.extend(_markers(frame, curve, colour))
        parts.extend(_legend(curve, colour, number))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Frame:
    """Maps data to the plot's pixels."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self._x = (x_low, (_WIDTH - _LEFT - _RIGHT) / (x_high - x_low))
        self._y = (y_low, (_HEIGHT - _TOP - _BOTTOM) / (y_high - y_low))

    def x(self, value: float) -> float:
        """Horizontal pixel."""
        return round(_LEFT + (value - self._x[0]) * self._x[1], 1)

    def y(self, value: float) -> float:
        """Vertical pixel."""
        return round(_HEIGHT - _BOTTOM - (value - self._y[0]) * self._y[1], 1)


def _ticks(values: Sequence[float], *, from_zero: bool) -> list[float]:
    """About six round numbers that span the values."""
    low, high = min(values), max(values)
    if from_zero:
        low = min(low, 0.0)
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _axes(
    frame: _Frame,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_label: str,
    y_label: str,
) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts: list[str] = []
    for tick in x_ticks:
        x = frame.x(tick)
        parts.append(f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#eee"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    return [
        *parts,
        f'<path d="M{_LEFT},{_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>',
        f'<text x="{middle_x}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(18,{middle_y}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]


def _line(frame: _Frame, curve: Curve, colour: str) -> list[str]:
    path = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in curve.points)
    return [f'<polyline points="{path}" fill="none" {_stroke(curve, colour)}/>']


def _markers(frame: _Frame, curve: Curve, colour: str) -> list[str]:
    return [
        f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="3" fill="{colour}"/>'
        for x, y in curve.points
    ]


def _legend(curve: Curve, colour: str, number: int) -> list[str]:
    x, y = _WIDTH - _RIGHT + 14, _TOP + 10 + 18 * number
    return [
        f'<line x1="{x}" y1="{y}" x2="{x + 22}" y2="{y}" {_stroke(curve, colour)}/>',
        f'<text x="{x + 28}" y="{y + 4}">{escape(curve.name)}</text>',
    ]


def _stroke(curve: Curve, colour: str) -> str:
    dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
    return f'stroke="{colour}" stroke-width="1.8"{dash}'
