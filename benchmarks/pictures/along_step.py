"""Op by op along one step: memory, what is saved, and recomputation, as in MONeT's figure 5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tightfit.reporting.pictures.labels import Label
from tightfit.reporting.pictures.page import PanelTitle, add_points
from tightfit.reporting.pictures.panels import Heading, Panel, panelled
from tightfit.reporting.pictures.scales import round_numbers
from tightfit.reporting.pictures.style import BLACK, Look, looks_of, shown_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["AlongStep", "step_picture"]


_MARKERS = 10
"""On each line."""


class AlongStep(msgspec.Struct, frozen=True):
    """What one plan does along a step, at the first run of each op."""

    planner: str  # whose plan it is
    memory_bytes: tuple[int, ...]  # held while the op runs
    # Time of all recomputation until then, as a share of the step with none
    recomputed: tuple[float, ...]


def step_picture(
    eager: AlongStep, planners: Sequence[AlongStep], *, title: str, suffix: str = ".svg"
) -> bytes:
    """Return a picture of three panels with one horizontal axis, the ops of the step.

    `eager`: of the step with nothing recomputed. `title`: above the picture. `suffix`: of the file:
    ``".svg"``, ``".png"`` or ``".pdf"``. Raises `MissingExtra` if matplotlib is not installed.
    """
    looks = looks_of([step.planner for step in planners])
    held = [_Curve("plain PyTorch", Look(BLACK, "o"), _gibibytes(eager.memory_bytes))]
    saved: list[_Curve] = []
    spent: list[_Curve] = []
    for step in planners:
        name, look = shown_name(step.planner), looks[step.planner]
        both = zip(eager.memory_bytes, step.memory_bytes, strict=True)
        held.append(_Curve(name, look, _gibibytes(step.memory_bytes)))
        saved.append(_Curve(name, look, _gibibytes([plain - own for plain, own in both])))
        spent.append(_Curve(name, look, tuple(100 * share for share in step.recomputed)))
    panels = {
        "Memory held while an op runs, constants included (GiB)": held,
        "Memory saved against plain PyTorch (GiB)": saved,
        "Recomputation so far (percent of the step)": spent,
    }
    return panelled(
        [_panel(text, curves) for text, curves in panels.items()],
        Heading(title),
        across="op of the step, forward then backward",
        height=120.0,
        suffix=suffix,
    )


class _Curve(msgspec.Struct, frozen=True):
    """A named line with a height for each op of the step."""

    name: str
    look: Look
    heights: tuple[float, ...]

    @property
    def is_ours(self) -> bool:
        """Whether it is drawn bold."""
        return self.look.is_ours

    @property
    def label(self) -> Label:
        """Its name, at its last op."""
        size = 8.0 if self.is_ours else 6.5
        return Label(self.name, (len(self.heights) - 1, self.heights[-1]), self.look, size)


def _gibibytes(sizes_bytes: Sequence[int]) -> tuple[float, ...]:
    return tuple(size / 2**30 for size in sizes_bytes)


def _panel(title: str, curves: Sequence[_Curve]) -> Panel:
    labels = [curve.label for curve in curves]
    return Panel(lambda axes: _draw_curves(axes, curves), labels, PanelTitle(title))


def _draw_curves(axes: Axes, curves: Sequence[_Curve]) -> None:
    """Lines op by op; each has markers at some ops, no two lines at the same."""
    ops = max(len(curve.heights) for curve in curves)
    heights = [0.0, *(height for curve in curves for height in curve.heights)]
    ticks = round_numbers(min(heights), max(heights) or 1.0)
    axes.set_xlim(0, ops - 1)
    axes.set_ylim(ticks[0], ticks[-1])
    axes.set_yticks(ticks)
    apart = max(1, ops // _MARKERS)
    for number, curve in enumerate(curves):
        axes.plot(curve.heights, **curve.look.line | {"linewidth": 2.2 if curve.is_ours else 1.1})
        marked = range((2 * number + 1) * apart // (2 * len(curves)), ops, apart)
        style = curve.look.marks(curve.label.marker_size)
        add_points(axes, [(op, curve.heights[op]) for op in marked], curve.name, **style)
