"""Models trained in several ways: time against peak memory, as shares of plain PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tightfit.reporting.pictures.labels import Label
from tightfit.reporting.pictures.page import PanelTitle, add_points
from tightfit.reporting.pictures.panels import Heading, Panel, panelled
from tightfit.reporting.pictures.scales import round_numbers
from tightfit.reporting.pictures.style import (
    BLACK,
    ORANGE,
    OUR_LOOK,
    OUR_MARKER_SIZE,
    PURPLE,
    QUIET,
    SKY_BLUE,
    Look,
    Marker,
    sizes_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Measured", "TrainedModel", "training_picture"]


class Measured(msgspec.Struct, frozen=True):
    """One way of training a model."""

    way: str  # its name; those that start with ``tightfit`` are points of one line
    # memory, time: of a step, as shares of plain PyTorch's
    memory: float
    time: float

    @property
    def is_ours(self) -> bool:
        """Whether tightfit trained."""
        return self.way.startswith("tightfit")


class TrainedModel(msgspec.Struct, frozen=True):
    """What was measured for one model."""

    name: str
    ways: tuple[Measured, ...]


def training_picture(
    models: Sequence[TrainedModel], *, title: str, notes: Sequence[str] = (), suffix: str = ".svg"
) -> bytes:
    """Return a picture with a panel per model, all with the same axes.

    `models`: at least one, with at least one way. `title`, `notes`: above the picture. `suffix`: of
    the file: ``".svg"``, ``".png"`` or ``".pdf"``. Raises `MissingExtra` if matplotlib is not
    installed.
    """
    ways = [way for model in models for way in model.ways]
    looks = _looks_of([way.way for way in ways if not way.is_ours])
    return panelled(
        [_panel(model, ways, _labels(model, looks)) for model in models],
        Heading(title, notes),
        across="peak memory, share of plain PyTorch's",
        height=150.0,
        columns=min(2, len(models)),
        suffix=suffix,
    )


def _panel(model: TrainedModel, ways: Sequence[Measured], labels: Sequence[Label]) -> Panel:
    def draw(axes: Axes) -> None:
        _set_axes(axes, ways)
        _draw_model(axes, model, labels)

    return Panel(draw, labels, PanelTitle(model.name))


def _labels(model: TrainedModel, looks: Mapping[str, tuple[str, Look]]) -> list[Label]:
    """Names of all ways; ours once, at the largest budget."""
    ours = [(way.memory, way.time) for way in model.ways if way.is_ours]
    labels = [Label("tightfit", max(ours), OUR_LOOK, OUR_MARKER_SIZE)] if ours else []
    others = [way for way in model.ways if not way.is_ours]
    sizes = sizes_of([way.way for way in others])
    for way in others:
        name, look = looks[way.way]
        labels.append(Label(name, (way.memory, way.time), look, sizes[way.way]))
    return labels


def _set_axes(axes: Axes, ways: Sequence[Measured]) -> None:
    """The same axes for all panels: they show every point, and plain PyTorch at one."""
    times = [1.0, *(way.time for way in ways)]
    memories = [1.0, *(way.memory for way in ways)]
    for values, set_limits, set_ticks, sign in (
        (memories, axes.set_xlim, axes.set_xticks, ""),
        (times, axes.set_ylim, axes.set_yticks, "x"),
    ):
        room = 0.06 * (max(values) - min(values)) or 0.1
        low, high = min(values) - room, max(values) + room
        ticks = [tick for tick in round_numbers(low, high) if low <= tick <= high]
        set_limits(low, high)
        set_ticks(ticks, [f"{tick:.2g}{sign}" for tick in ticks])
    axes.axhline(1.0, color=QUIET, linewidth=0.8, zorder=1.5)


def _draw_model(axes: Axes, model: TrainedModel, labels: Sequence[Label]) -> None:
    """Our line, then a marker for every point: that of its label, and one per budget of ours."""
    ours = sorted((way.memory, way.time) for way in model.ways if way.is_ours)
    if ours:
        axes.plot(*zip(*ours, strict=True), **OUR_LOOK.line)
    for label in labels:
        own = [] if label.at is None else [label.at]
        style = label.look.marks(label.marker_size)
        add_points(axes, ours if label.look.is_ours else own, label.text, **style)


class _Way(msgspec.Struct, frozen=True):
    """A way to train, of which there are several settings."""

    start: str  # of its name; the setting follows
    shown: str  # what stands for the start where there is little room
    colour: str  # of all settings
    markers: tuple[Marker, ...]  # of the settings, in the order of their names


_WAYS = (
    _Way("eager", "plain PyTorch", BLACK, ("o",)),
    _Way("checkpoint per block", "checkpoint per block", ORANGE, ("s",)),
    _Way("checkpoint_sequential, ", "sequential, ", ORANGE, ("^", "v", "<", ">")),
    _Way("activation_memory_budget ", "memory budget ", PURPLE, ("D", "d", "p", "P")),
)
"""What we are compared with when a model trains; another way is drawn in a colour of its own."""


def _looks_of(names: Iterable[str]) -> dict[str, tuple[str, Look]]:
    """Return for each way of training what it is called in a picture, and how it is drawn."""
    left = sorted(set(names))
    looks: dict[str, tuple[str, Look]] = {}
    for way in (*_WAYS, _Way("", "", SKY_BLUE, ())):
        settings = [name for name in left if name.startswith(way.start)]
        for number, name in enumerate(settings):
            marker = way.markers[number] if number < len(way.markers) else (number + 4, 1, 0)
            looks[name] = (way.shown + name.removeprefix(way.start), Look(way.colour, marker))
        left = [name for name in left if name not in looks]
    return looks
