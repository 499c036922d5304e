"""How everything looks: a colour per family of planners, a marker per member, ours bold.

The colours are from Okabe and Ito (2008): people with any kind of colour vision can tell them
apart. Markers and widths say the same in print without colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

BLACK, ORANGE, SKY_BLUE, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

INK, QUIET, PALE = "#222222", "#666666", "#D0D0D0"
"""Text, less important text, lines that are there for comparison only."""
BOUND = "#D6E6F2"
"""Proven impossible budgets: a pale tint of our own colour."""

TITLE_SIZE, NAME_SIZE, SMALL_SIZE = 11.0, 8.6, 8.0
"""In points: 14.7, 11.5 and 10.7 pixels where a page is shown at its own width."""

OUR_MARKER_SIZE = 9.5
_MARKER_SIZES = (8.0, 5.2)
"""In points; of others the first and the last in a panel: where they meet, all are seen."""

Marker = str | tuple[int, int, int]
"""Of matplotlib: a letter, or a star by its number of rays."""

SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same widths everywhere
    "font.size": NAME_SIZE,
    "text.color": INK,
    "text.parse_math": False,
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": QUIET,
    "axes.labelsize": SMALL_SIZE,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "xaxis.labellocation": "left",
    "xtick.color": QUIET,
    "xtick.labelsize": SMALL_SIZE,
    "xtick.major.size": 3.0,
    "ytick.color": QUIET,
    "ytick.labelsize": SMALL_SIZE,
    "ytick.major.size": 0.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "tightfit",
    "pdf.fonttype": 42,
}
"""For matplotlib, on top of its defaults: text stays text, the same picture has the same bytes."""


class Look(msgspec.Struct, frozen=True):
    """How one line or point is drawn."""

    colour: str  # that of its family
    marker: Marker  # of matplotlib; no two members of a family share one
    # Drawn bold; the others are on top of it, so that both are seen where they meet
    is_ours: bool = False

    @property
    def line(self) -> dict[str, Any]:
        """For matplotlib: its line."""
        width, order = (4.0, 3.0) if self.is_ours else (1.3, 4.0)
        return {"color": self.colour, "linewidth": width, "zorder": order}

    def marks(self, size: float, *, is_filled: bool = True) -> dict[str, Any]:
        """For matplotlib: its markers, filled or open, of a size in points."""
        return {
            "linestyle": "none",
            "marker": self.marker,
            "markersize": size,
            "markeredgecolor": "white" if is_filled else self.colour,
            "markerfacecolor": self.colour if is_filled else "white",
            "markeredgewidth": 0.8 if is_filled else 1.2,
            "zorder": 5.0,
            "clip_on": False,  # whole at the edge of the axes
        }


class Family(msgspec.Struct, frozen=True):
    """Planners that belong together."""

    title: str  # above its panel
    colour: str  # of all its members
    members: tuple[tuple[str, Marker], ...]  # planners, each with its marker
    prefix: str = ""  # common to the names; left out where the title is above them

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.members)


OURS = "anytime"
"""The planner that is drawn bold."""
OUR_LOOK = Look(BLUE, "o", is_ours=True)

FAMILIES = (
    Family("tightfit", BLUE, ((OURS, "o"), ("greedy", "s"))),
    Family(
        "Checkmate",
        VERMILLION,
        (
            ("checkmate", "^"),
            ("checkmate+", "v"),
            ("checkmate:split", "<"),
            ("checkmate_rounding", ">"),
            ("checkmate_o", "P"),
        ),
    ),
    Family(
        "MONeT and retention intervals",
        GREEN,
        (("monet", "D"), ("monet_all", "X"), ("monet:loose", "d"), ("intervals", "p")),
    ),
    Family(
        "Checkpointing heuristics",
        ORANGE,
        (
            ("gist", "D"),
            ("griewank", "P"),
            ("chen_sqrt", "s"),
            ("chen_greedy", "o"),
            ("ap_sqrt", "^"),
            ("ap_greedy", "v"),
            ("linearised_sqrt", ">"),
            ("linearised_greedy", "<"),
        ),
    ),
    Family(
        "Eviction policies",
        PURPLE,
        (
            ("eviction", "P"),
            ("eviction:h_dtr_eq", "^"),
            ("eviction:h_dtr_local", "X"),
            ("eviction:lru", "D"),
            ("eviction:size", "s"),
            ("eviction:msps", "o"),
        ),
    ),
    Family(
        "PyTorch's own",
        BLACK,
        (
            ("pytorch.activation_memory_budget", "p"),
            ("pytorch.checkpoint", "s"),
            ("pytorch.min_cut", "^"),
        ),
        prefix="pytorch.",
    ),
)
"""Every planner has its place here; a planner without a place is drawn among the others."""


def families_of(names: Iterable[str]) -> tuple[Family, ...]:
    """Return all families; planners that belong to none are one of their own, the last."""
    known = {name for family in FAMILIES for name in family.names}
    others = sorted(set(names).difference(known))
    if not others:
        return FAMILIES
    stars = ((name, (number + 4, 1, 0)) for number, name in enumerate(others))
    return (*FAMILIES, Family("Others", SKY_BLUE, tuple(stars)))


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """Return how each planner is drawn: no two alike, and a known planner always the same."""
    names = set(names)
    return {
        member: OUR_LOOK if member == OURS else Look(family.colour, marker)
        for family in families_of(names)
        for member, marker in family.members
        if member in names
    }


def shown_name(planner: str) -> str:
    return f"tightfit ({planner})" if planner == OURS else planner


def sizes_of(names: Sequence[str]) -> dict[str, float]:
    """Return the sizes of the markers that share a panel, in points: a later one is smaller."""
    first, last = _MARKER_SIZES
    step = (first - last) / max(1, len(names) - 1)
    return {name: first - number * step for number, name in enumerate(names)}
