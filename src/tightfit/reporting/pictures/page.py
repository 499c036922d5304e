"""Pages: figures with panels at given places, drawings next to them, and their bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tightfit.errors import MissingExtra
from tightfit.reporting.pictures.style import INK, QUIET, SETTINGS, SMALL_SIZE, TITLE_SIZE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SUFFIXES = (".svg", ".png", ".pdf")
"""How the names of files with pictures end."""

WIDTH = 640.0
"""Points of a page: 853 pixels, about the column in which GitHub shows a document."""

_TITLE_HEIGHT, _LINE_HEIGHT, _LABEL_HEIGHT = 26.0, 12.0, 12.0
_LEFT, _RIGHT, _ABOVE, _BELOW = 40.0, 8.0, 26.0, 20.0
"""Points around the axes of a panel; names are between the axes and `_RIGHT`."""

_NARROWEST = 90.0
"""Points of axes next to names that are too long."""

_POINTS_PER_INCH = 72
_PIXELS_PER_INCH = 192  # of a PNG: twice a screen's
_LEFT_OUT = {
    ".svg": ("Date", "Creator", "Format", "Type"),
    ".png": ("Software",),
    ".pdf": ("CreationDate", "Creator", "Producer"),
}
"""Metadata of a file about its time and version, which are left out."""


def require_pictures() -> None:
    """Raise `MissingExtra`, which says what to install, if matplotlib is not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtra("a picture needs matplotlib: pip install tightfit[plot]") from error


def drawn(draw: Callable[[Figure], None], *, height: float, suffix: str) -> bytes:
    """Return the file of a page; the same page gives the same bytes.

    `draw`: draws on the empty page. `height`: in points; the width is `WIDTH`.
    """
    require_pictures()
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", SETTINGS]):
        size = (WIDTH / _POINTS_PER_INCH, height / _POINTS_PER_INCH)
        figure = Figure(figsize=size, dpi=_POINTS_PER_INCH, facecolor="white")
        draw(figure)
        file = io.BytesIO()
        left_out = dict.fromkeys(_LEFT_OUT[suffix])
        figure.savefig(file, format=suffix[1:], dpi=_PIXELS_PER_INCH, metadata=left_out)
    return _shortened(file.getvalue()) if suffix == ".svg" else file.getvalue()


def _shortened(svg: bytes) -> bytes:
    """Cut coordinates to hundredths of a point; leave out numbered names and turns by nothing."""

    def in_tag(tag: re.Match[bytes]) -> bytes:
        text = re.sub(rb"(\d\.\d\d)\d+", rb"\1", tag[0])
        text = re.sub(rb' id="[A-Za-z.]+\d?_\d+"', b"", text)
        text = re.sub(rb' transform="rotate\(-?0 [^"]*\)"', b"", text)
        return re.sub(rb"\s+", b" ", text)

    return re.sub(rb">\s+<", b">\n<", re.sub(rb"<[^>]+>", in_tag, svg))


class Grid(msgspec.Struct, frozen=True):
    """Panels of equal size, row by row."""

    # count, columns: how many panels, and how many side by side
    count: int
    columns: int
    height: float  # of the axes of each, in points
    notes: int = 0  # lines of the heading below its title

    @property
    def top(self) -> float:
        """Points that the heading takes."""
        return _TITLE_HEIGHT + _LINE_HEIGHT * self.notes

    @property
    def page_height(self) -> float:
        """Points of the whole page."""
        rows = -(-self.count // self.columns)
        return self.top + rows * (_ABOVE + self.height + _BELOW) + _LABEL_HEIGHT

    def is_lowest(self, number: int) -> bool:
        """Whether no panel is below this panel."""
        return number + self.columns >= self.count


class PanelTitle(msgspec.Struct, frozen=True):
    text: str = ""
    colour: str = INK


def add_panels(
    figure: Figure, grid: Grid, names_width: float, titles: Sequence[PanelTitle] = ()
) -> list[Axes]:
    """Add axes with a quiet grid of horizontal lines.

    `names_width`: points to the right of each for names. `titles`: one per panel, or none at all.
    """
    column, page = WIDTH / grid.columns, figure.bbox.height
    width = max(_NARROWEST, column - _LEFT - names_width - _RIGHT)
    panels: list[Axes] = []
    for number in range(grid.count):
        row, place = divmod(number, grid.columns)
        left = _LEFT + place * column
        top = page - grid.top - _ABOVE - row * (_ABOVE + grid.height + _BELOW)
        box = (left / WIDTH, (top - grid.height) / page, width / WIDTH, grid.height / page)
        panels.append(figure.add_axes(box))
        if titles:
            text, colour = titles[number].text, titles[number].colour
            add_text(figure, left - _LEFT + 8, top + 13, text, color=colour, fontweight="bold")
    return panels


def add_heading(figure: Figure, title: str, notes: Sequence[str] = ()) -> None:
    """Write a title, and lines that say how to read the picture, at the page's top."""
    top = figure.bbox.height
    add_text(figure, 8, top - 14, title, fontsize=TITLE_SIZE, fontweight="bold")
    for number, note in enumerate(notes):
        y = top - _TITLE_HEIGHT - _LINE_HEIGHT * (number + 0.3)
        add_text(figure, 8, y, note, fontsize=SMALL_SIZE, color=QUIET)


def add_points(axes: Axes, places: Sequence[tuple[float, float]], name: str, **style: Any) -> None:
    """Draw markers in a panel; in an SVG they are one group, known by their name and the panel."""
    if places:
        panel = axes.figure.axes.index(axes)
        axes.plot(*zip(*places, strict=True), **style, gid=f"points: {name} {panel}")


def add_text(figure: Figure | SubFigure, x: float, y: float, text: str, **style: Any) -> None:
    """Write on the page; points from its lower left corner."""
    figure.text(
        x / _POINTS_PER_INCH,
        y / _POINTS_PER_INCH,
        text,
        transform=figure.dpi_scale_trans,
        **{"va": "center_baseline", **style},
    )


def add_line(
    figure: Figure | SubFigure, x: Sequence[float], y: Sequence[float], **style: Any
) -> None:
    """Draw a line or markers on the page; points from its lower left corner."""
    from matplotlib.lines import Line2D

    inches = [[value / _POINTS_PER_INCH for value in values] for values in (x, y)]
    figure.add_artist(Line2D(*inches, transform=figure.dpi_scale_trans, **style))
