"""Optimal assignments (SciPy) in a trace, as detectors match their outputs with targets.

`scipy.optimize.linear_sum_assignment` leaves PyTorch and comes back: it takes computed costs and
gives indices. How many there are follows from the shape of the costs, so that it can be an
operator like others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from tightfit.torch_private import core as private

__all__ = ["TracedArray", "traced_matching"]

_NAME = "linear_sum_assignment"
_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
_LIBRARY.define("matched(Tensor costs, bool maximize) -> (Tensor, Tensor)")
_MATCHED = torch.ops.tightfit.matched.default


class TracedArray:
    """A traced tensor after `numpy()`: it has no values, and may only be matched.

    Parameters
    ----------
    tensor : torch.Tensor
        What it was made of.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError("numpy() of a tensor that is computed in the forward")

    __array__ = __bool__ = __eq__ = __getattr__ = _refuse
    __hash__ = None  # type: ignore[assignment]


@contextlib.contextmanager
def traced_matching() -> Iterator[None]:
    """While tracing, let SciPy's assignments be operators of the trace, wherever imported."""
    optimize = sys.modules.get("scipy.optimize")
    original = getattr(optimize, _NAME, None)
    if original is None:
        yield
        return

    def matching(cost_matrix: Any, maximize: bool = False) -> Any:
        costs = cost_matrix.tensor if isinstance(cost_matrix, TracedArray) else cost_matrix
        if isinstance(costs, torch.Tensor) and private.is_traced(costs):
            return _MATCHED(costs.detach(), bool(maximize))
        return original(cost_matrix, maximize)

    from_numpy = torch.from_numpy

    def from_array(array: Any) -> torch.Tensor:
        return array if isinstance(array, torch.Tensor) else from_numpy(array)

    loaded = list(sys.modules.values())
    importers = [m for m in loaded if getattr(m, "__dict__", {}).get(_NAME) is original]
    for module in importers:
        setattr(module, _NAME, matching)
    torch.from_numpy = from_array
    try:
        yield
    finally:
        torch.from_numpy = from_numpy
        for module in importers:
            setattr(module, _NAME, original)


@torch.library.impl(_LIBRARY, "matched", "CPU")
def _matched(costs: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(costs.numpy(), maximize)
    return torch.from_numpy(rows), torch.from_numpy(columns)


@torch.library.register_fake("tightfit::matched")
def _fake_matched(costs: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    count = min(costs.shape)
    indices = [torch.empty(count, dtype=torch.int64, device=costs.device) for _ in range(2)]
    return indices[0], indices[1]
