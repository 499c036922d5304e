"""A layout: every block as a rectangle, its lifetime along the page and its bytes up the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tightfit.reporting.pictures.panels import Heading, Panel, panelled
from tightfit.reporting.pictures.scales import round_numbers
from tightfit.reporting.pictures.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY_BLUE
from tightfit.units import format_bytes, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (BLUE, SKY_BLUE, GREEN, ORANGE, PURPLE)
"""In turns, so that adjacent blocks can be distinguished; edges do it without colours."""


class Rectangle(msgspec.Struct, frozen=True):
    """One block in its place."""

    # lower, upper: ticks between which it is alive
    lower: int
    upper: int
    # offset_bytes, size_bytes: its first byte, and how many it takes
    offset_bytes: int
    size_bytes: int


def layout_picture(
    rectangles: Sequence[Rectangle], *, title: str, bound_bytes: int, suffix: str = ".svg"
) -> bytes:
    """Return a picture of a layout, with a line at the bound that none is below.

    `bound_bytes`: the largest load.
    """
    height_bytes = max((r.offset_bytes + r.size_bytes for r in rectangles), default=0)
    unit, unit_bytes = unit_of(height_bytes)
    notes = (
        f"{len(rectangles)} blocks; height {format_bytes(height_bytes)}, "
        f"line: largest load {format_bytes(bound_bytes)}",
    )

    def draw(axes: Axes) -> None:
        _draw_blocks(axes, rectangles, unit_bytes)
        axes.axhline(bound_bytes / unit_bytes, color=INK, linewidth=1.0, gid="bound")
        ticks = round_numbers(0.0, max(height_bytes / unit_bytes, 1e-9))
        axes.set_ylim(0.0, ticks[-1])
        axes.set_yticks(ticks)

    return panelled(
        [Panel(draw)],
        Heading(title, notes),
        across=f"allocations and frees; offset in {unit}",
        height=320.0,
        suffix=suffix,
    )


def _draw_blocks(axes: Axes, rectangles: Sequence[Rectangle], unit_bytes: int) -> None:
    from matplotlib.collections import PolyCollection

    corners: list[list[tuple[float, float]]] = []
    for r in rectangles:
        low, high = (b / unit_bytes for b in (r.offset_bytes, r.offset_bytes + r.size_bytes))
        corners.append([(r.lower, low), (r.upper, low), (r.upper, high), (r.lower, high)])
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(corners))]
    axes.add_collection(
        PolyCollection(
            corners, facecolors=colours, edgecolors="white", linewidths=0.3, gid="blocks"
        )
    )
    axes.set_xlim(
        min((r.lower for r in rectangles), default=0), max((r.upper for r in rectangles), default=1)
    )
