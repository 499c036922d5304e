"""In which stretches of a traced call autocast would have kept the casts of weights."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch

from tightfit.torch_private import core as private

__all__ = ["CastRegions"]


class CastRegions:
    """Follows autocast while a step is traced.

    Eager keeps the casts of weights until the outermost autocast ends. A region is a stretch
    between two such ends in which casts are kept; operators are placed in it by the number of
    autograd that they carry.
    """

    def __init__(self) -> None:
        self._keeps = torch.is_autocast_cache_enabled()
        self._starts: list[int] = []
        self._regions: list[int | None] = []
        self._region = 0
        self._watched: Any = None

    def __enter__(self) -> CastRegions:
        self._watched = private.watched_autocast(self._changed)
        self._watched.__enter__()
        self._note(self._keeps)
        return self

    def __exit__(self, *_: Any) -> None:
        self._watched.__exit__(None, None, None)

    def _changed(self) -> None:
        if private.autocast_nesting() == 0:
            self._region += 1
        self._note(torch.is_autocast_cache_enabled())

    def _note(self, keeps: bool) -> None:
        casts = any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda"))
        self._starts.append(private.sequence_number())
        self._regions.append(self._region if keeps and casts else None)

    def region_at(self, sequence: int | None) -> int | None:
        """Return the region of an operator; None: casts were not kept there."""
        if sequence is None:
            return None
        position = bisect_right(self._starts, sequence) - 1
        return self._regions[position] if position >= 0 else None
