"""Recorded steps of real training lie exactly at the lower bound, and hard instances fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.blocks import TRACES
from tightfit.layout.io import load_blocks
from tightfit.layout.pack import pack
from tightfit.layout.packers.base import PackingLimits

pytestmark = pytest.mark.skipif(not TRACES, reason="needs ../shared/data/blocks")

CAPACITY = 1048576
"""Bytes into which every MiniMalloc instance fits."""

LIMIT = PackingLimits(seconds=60.0)
"""Ample: each takes less than a second of an idle processor."""


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".csv.gz"))
def test_the_default_packer_is_perfect(path: Path) -> None:
    packed = pack(load_blocks(path), limits=LIMIT)
    if path.name.startswith("minimalloc"):
        assert packed.height_bytes <= CAPACITY
    else:
        assert packed.height_bytes == packed.lower_bound_bytes


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".csv.gz"))
def test_the_papers_heuristic_by_area_is_within_a_percent_on_real_traces(path: Path) -> None:
    packed = pack(load_blocks(path), "paper_area")
    assert packed.ratio <= (1.3 if path.name.startswith("minimalloc") else 1.007)
