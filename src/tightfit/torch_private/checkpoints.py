"""Regions of `torch.utils.checkpoint`, seen as they run. Private names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch.utils import checkpoint

from tightfit.torch_private.patches import Patch

__all__ = ["watched_checkpoints"]


@contextlib.contextmanager
def watched_checkpoints(seen: Callable[[bool], None]) -> Iterator[None]:
    """Tell of each checkpointed region that is not reentrant, or that Dynamo has made a graph of.

    Parameters
    ----------
    seen : callable
        Told whether the region, run again, draws the random numbers that it drew at first.
    """

    def region(
        regions: Any, function: Any, preserve: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        seen(preserve)
        return regions(function, preserve, *args, **kwargs)

    def graph(graphs: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        seen(bool(kwargs.get("preserve_rng_state", True)))
        return graphs(self, module, *args, **kwargs)

    with _REGIONS.by(region), _GRAPHS.by(graph):
        yield


_REGIONS = Patch(checkpoint, "_checkpoint_without_reentrant_generator")
_GRAPHS = Patch(TagActivationCheckpoint, "__call__")
