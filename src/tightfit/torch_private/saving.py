"""Saved tensors of autograd: hooks on them, and checkpointed regions. Private names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._higher_order_ops.wrap import TagActivationCheckpoint

from tightfit.torch_private.patches import Patch

_KNOWN = ("torch.utils.checkpoint", "tightfit.")
"""Modules whose hooks change no bit of saved tensors."""


def saving_hook() -> str:
    """Return which foreign hook packs tensors saved for backward now; "": none does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else _named(hooks[0])


@contextlib.contextmanager
def watched_checkpoints(seen: Callable[[bool], None]) -> Iterator[None]:
    """Tell of each checkpointed region that Dynamo has made a graph of.

    `seen`: called with whether the region, run again, draws the random numbers that it drew at
    first.
    """

    def graph(graphs: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        seen(bool(kwargs.get("preserve_rng_state", True)))
        return graphs(self, module, *args, **kwargs)

    with _GRAPHS.by(graph):
        yield


_GRAPHS = Patch(TagActivationCheckpoint, "__call__")


def _named(pack: Any) -> str:
    module = getattr(pack, "__module__", None) or ""
    if module.startswith(_KNOWN):
        return ""
    return f"{module}.{getattr(pack, '__qualname__', type(pack).__name__)}".lstrip(".")
