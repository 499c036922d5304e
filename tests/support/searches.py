"""Searches for better plans, which go on while a model trains."""

from __future__ import annotations

from torch import nn

from tightfit.execution.attach import attached

__all__ = ["wait_for_searches"]


def wait_for_searches(model: nn.Module) -> None:
    """Wait until no better plan is searched: what is found is the same, but not the moment."""
    fitted = attached(model)
    for shape in () if fitted is None else fitted.specialisations:
        for search in shape.searches.values():
            search.wait()
