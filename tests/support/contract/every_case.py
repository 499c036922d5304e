"""All cases of both batteries."""

from __future__ import annotations

from support.contract.outputs import OutputCase
from support.contract.shapes import SHAPES

__all__ = ["OUTPUTS"]

OUTPUTS: tuple[OutputCase, ...] = (*SHAPES,)
