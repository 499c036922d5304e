"""Every test here plans with unit costs: fast, and the same on every machine."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    pass
