"""One picture of each kind, made without PyTorch."""

from __future__ import annotations

from benchmarks.pictures.along_step import AlongStep, step_picture
from benchmarks.pictures.training import Measured, TrainedModel, training_picture
from tightfit.reporting.pictures.comparison import comparison_picture
from tightfit.reporting.pictures.curve import curve_picture
from tightfit.reporting.pictures.found import Found, Series
from tightfit.reporting.pictures.layout import Rectangle, layout_picture
from tightfit.reporting.pictures.policies import PolicyCurve, policies_picture
from tightfit.reporting.pictures.ways import MeasuredWay, WaysOfOp, ways_picture


def every_picture(suffix: str) -> list[bytes]:
    """Return one of each kind."""
    points = (Found(1.0, 0.3, 0.1), Found(2.0, 0.01, 0.01, "optimal"))
    ways = (Measured("eager", 1.0, 1.0), Measured("tightfit 0.5", 0.5, 1.1))
    steps = [AlongStep(name, (1 << 30, 0), (0.0, 0.1)) for name in ("eager", "anytime")]
    texts = {"title": "t", "suffix": suffix}
    return [
        comparison_picture([Series("monet", points)], budgets="GiB", **texts),
        curve_picture(points, budgets="GiB", **texts),
        training_picture([TrainedModel("net", ways)], **texts),
        step_picture(steps[0], steps[1:], **texts),
        policies_picture(
            [PolicyCurve("lru", (0.5, 1.0), (None, 1.0)), PolicyCurve("size", (0.5,), (None,))],
            measure="slowdown",
            constants_ratio=0.1,
            bottleneck_ratio=0.2,
            **texts,
        ),
        ways_picture([WaysOfOp("op", (MeasuredWay("default", 1e-3, 1 << 20),))], **texts),
        layout_picture([Rectangle(0, 2, 0, 1 << 20)], bound_bytes=1 << 19, **texts),
    ]
