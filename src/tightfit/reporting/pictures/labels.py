"""Names next to the ends of lines, moved apart as little as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tightfit.reporting.pictures.page import add_line, add_text
from tightfit.reporting.pictures.style import BOUND, INK, NAME_SIZE, QUIET, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GAP = 11.6
"""Points from one name to the next."""
_BEND, _SIGN, _NAME = 9.0, 15.0, 22.0
"""Points from the right edge of the axes to the end of the leader, the marker, the name."""
_AREA = Look(BOUND, "s")


class Label(msgspec.Struct, frozen=True):
    """A name in the column to the right of the axes."""

    text: str  # the name
    # The point that it names, in data; None: it has none and is at the top
    at: tuple[float, float] | None = None
    look: Look = _AREA  # of the marker next to it; by default that of a shaded area
    marker_size: float = 7.0  # in points
    is_filled: bool = True  # whether its marker is filled, as at the point


def moved_apart(targets: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places as near to the targets as a gap between neighbours allows.

    The sum of squared distances is the least possible. Without the gaps the places are an isotonic
    regression, found by pooling adjacent violators. The nearest regression within limits is that
    regression, cut off there (Barlow et al., 1972).

    `targets`: ascending. `gap`: between neighbours; less if they do not fit with that.
    """
    count = len(targets)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    pools: list[tuple[float, int]] = []
    for number, target in enumerate(targets):
        mean, size = target - number * gap, 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean = (before * others + mean * size) / (others + size)
            size += others
        pools.append((mean, size))
    flat = [mean for mean, size in pools for _ in range(size)]
    highest = high - max(0, count - 1) * gap
    return [min(max(place, low), highest) + number * gap for number, place in enumerate(flat)]


def names_width(labels: Sequence[Label]) -> float:
    """Return the points to the right of the axes that names take."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    fonts = [FontProperties(family="DejaVu Sans", weight=_weight(label)) for label in labels]
    widths = [
        TextPath((0, 0), label.text, size=NAME_SIZE, prop=font).get_extents().width
        for label, font in zip(labels, fonts, strict=True)
    ]
    return _NAME + max(widths, default=0.0)


def draw_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Write names to the right of the axes, each with its marker and a leader from its point."""
    box = axes.get_window_extent()
    ends = [None if label.at is None else axes.transData.transform(label.at) for label in labels]
    heights = [box.y1 if end is None else end[1] for end in ends]
    order = sorted(range(len(labels)), key=lambda number: (heights[number], -number))
    targets = [heights[number] for number in order]
    places = moved_apart(targets, _GAP, box.y0 + 3, box.y1 - 3)
    for number, y in zip(order, places, strict=True):
        label, end = labels[number], ends[number]
        if end is not None:
            start = end[0] + label.marker_size / 2 + 2
            corners = [start, max(start, box.x1), box.x1 + _BEND], [end[1], end[1], y]
            add_line(axes.figure, *corners, color=QUIET, linewidth=0.6, linestyle=":")
        style = label.look.marks(label.marker_size, is_filled=label.is_filled)
        add_line(axes.figure, [box.x1 + _SIGN], [y], **style)
        colour = label.look.colour if label.look.is_ours else INK
        add_text(
            axes.figure, box.x1 + _NAME, y, label.text, color=colour, fontweight=_weight(label)
        )


def _weight(label: Label) -> str:
    return "bold" if label.look.is_ours else "normal"
