"""The frame of every picture: a heading, panels of equal size, names next to their lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tightfit.reporting.pictures.labels import Label, draw_labels, names_width
from tightfit.reporting.pictures.page import Grid, PanelTitle, add_heading, add_panels, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Panel(msgspec.Struct, frozen=True):
    """The content of one pair of axes."""

    draw: Callable[[Axes], None]  # draws on the axes, and sets their limits and ticks
    labels: Sequence[Label] = ()  # names to the right of them
    title: PanelTitle = PanelTitle()  # above them


class Heading(msgspec.Struct, frozen=True):
    """The text above a picture."""

    title: str
    notes: Sequence[str] = ()


def panelled(
    panels: Sequence[Panel],
    heading: Heading,
    *,
    across: str,
    height: float,
    columns: int = 1,
    suffix: str = ".svg",
) -> bytes:
    """Return a picture of panels that share their horizontal axis.

    `across`: the label of the horizontal axis, below the lowest panels. `height`: of the axes of
    each panel, in points. `columns`: panels side by side.
    """
    grid = Grid(len(panels), columns, height, len(heading.notes))

    def draw(figure: Figure) -> None:
        add_heading(figure, heading.title, heading.notes)
        labels = [label for panel in panels for label in panel.labels]
        width = names_width(labels) if labels else 0.0
        every = add_panels(figure, grid, width, [panel.title for panel in panels])
        for number, (axes, panel) in enumerate(zip(every, panels, strict=True)):
            panel.draw(axes)
            if grid.is_lowest(number):
                axes.set_xlabel(across)
            draw_labels(axes, panel.labels)

    return drawn(draw, height=grid.page_height, suffix=suffix)
