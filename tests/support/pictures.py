"""What a picture shows, read from its SVG."""

from __future__ import annotations

from xml.etree import ElementTree

_SVG = "{http://www.w3.org/2000/svg}"
_POINTS = "points: "


def texts_in(svg: bytes) -> dict[str, list[tuple[float, float]]]:
    """Return the places, in points from the upper left corner, at which each text stands."""
    places: dict[str, list[tuple[float, float]]] = {}
    for text in ElementTree.fromstring(svg).iter(f"{_SVG}text"):
        if "x" in text.attrib:
            place = (float(text.attrib["x"]), float(text.attrib["y"]))
            places.setdefault(text.text or "", []).append(place)
    return places


def points_in(svg: bytes) -> dict[str, int]:
    """Return how many markers are drawn, by the name of what they stand for."""
    return {
        group.attrib["id"].removeprefix(_POINTS): len(list(group.iter(f"{_SVG}use")))
        for group in ElementTree.fromstring(svg).iter(f"{_SVG}g")
        if group.attrib.get("id", "").startswith(_POINTS)
    }
