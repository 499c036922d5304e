"""The ways to compute an op: time against workspace, as in MONeT's figure 7."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle
from typing import TYPE_CHECKING

import msgspec

from tightfit.reporting.pictures.labels import Label
from tightfit.reporting.pictures.page import PanelTitle, add_points
from tightfit.reporting.pictures.panels import Heading, Panel, panelled
from tightfit.reporting.pictures.scales import round_numbers
from tightfit.reporting.pictures.style import (
    BLACK,
    GREEN,
    ORANGE,
    OUR_LOOK,
    PURPLE,
    SKY_BLUE,
    VERMILLION,
    Look,
    sizes_of,
)
from tightfit.units import unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NOTES = ("Time of each way to compute the op, in milliseconds, by the memory it works with.",)
_LOOKS = tuple(
    Look(colour, marker)
    for colour, marker in zip(
        (BLACK, GREEN, ORANGE, PURPLE, VERMILLION, SKY_BLUE), "osD^vP", strict=True
    )
)
_HEIGHT = 120.0


class MeasuredWay(msgspec.Struct, frozen=True):
    """One way, measured by itself: its name, seconds and bytes."""

    name: str
    cost_s: float
    workspace_bytes: int


class WaysOfOp(msgspec.Struct, frozen=True):
    """The ways to compute one op, which has a title."""

    title: str
    ways: tuple[MeasuredWay, ...]


def ways_picture(ops: Sequence[WaysOfOp], *, title: str, suffix: str = ".svg") -> bytes:
    """Return a picture with a panel for each op.

    `ops`: the default first in each.
    """
    unit, unit_bytes = unit_of(max(way.workspace_bytes for op in ops for way in op.ways))
    return panelled(
        [_panel(op, unit_bytes) for op in ops],
        Heading(title, _NOTES),
        across=f"workspace in {unit}",
        height=_HEIGHT,
        suffix=suffix,
    )


def _panel(op: WaysOfOp, unit_bytes: int) -> Panel:
    """Return the panel of an op: a name for each way, the default drawn bold."""
    sizes = sizes_of([way.name for way in op.ways])
    looks = chain([OUR_LOOK], cycle(_LOOKS))
    labels = [
        Label(way.name, (way.workspace_bytes / unit_bytes, 1e3 * way.cost_s), look, sizes[way.name])
        for way, look in zip(op.ways, looks, strict=False)
    ]
    return Panel(lambda axes: _draw(axes, labels), labels, PanelTitle(op.title))


def _draw(axes: Axes, labels: Sequence[Label]) -> None:
    places = [label.at for label in labels if label.at is not None]
    across = round_numbers(0.0, max(*(x for x, _ in places), 1e-3))
    up = round_numbers(0.0, max(y for _, y in places))
    axes.set_xlim(0.0, across[-1])
    axes.set_xticks(across)
    axes.set_ylim(0.0, up[-1])
    axes.set_yticks(up)
    for label, place in zip(labels, places, strict=True):
        add_points(axes, [place], label.text, **label.look.marks(label.marker_size))
