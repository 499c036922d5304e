"""A mark that limits what a test may allocate: ``@pytest.mark.training_memory("8GiB")``.

Inert unless a test uses it: without it neither PyTorch nor the allocator's hook is touched.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tightfit.units import format_bytes, parse_bytes

__all__ = ["pytest_configure", "pytest_runtest_call"]

_USE = 'write @pytest.mark.training_memory("8GiB"), or with device="cuda"'


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line(
        "markers",
        'training_memory(limit, device="cpu"): fail if PyTorch\'s allocator gives out more than '
        "the limit at any instant of the test",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Meter a test that has the mark, and fail it if it held more than its limit."""
    mark = item.get_closest_marker("training_memory")
    if mark is None:
        return (yield)
    if len(mark.args) != 1 or mark.kwargs.keys() - {"device"}:
        raise pytest.UsageError(f"{item.nodeid}: {_USE}")
    limit = parse_bytes(mark.args[0], what="limit of the test")
    from tightfit.allocator import meter_for

    meter = meter_for(mark.kwargs.get("device", "cpu"))
    before = meter.live_bytes()
    meter.reset_peak()
    result = yield
    held = meter.peak_bytes() - before
    if held > limit:
        pytest.fail(
            f"{item.name} was limited to {format_bytes(limit)} but held {format_bytes(held)}. "
            "To see who holds it: tightfit report MODEL, or tightfit.report(model).html(path)",
            pytrace=False,
        )
    return result
