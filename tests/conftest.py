"""What holds for every test."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_caches() -> Iterator[None]:
    """Keep costs and plans of the tests out of the user's cache."""
    before = os.environ.get("TIGHTFIT_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="tightfit-tests-") as folder:
        os.environ["TIGHTFIT_CACHE_DIR"] = folder
        yield
        if before is None:
            del os.environ["TIGHTFIT_CACHE_DIR"]
        else:
            os.environ["TIGHTFIT_CACHE_DIR"] = before


def pytest_collection_finish() -> None:
    """Let no collection of garbage look through all that was imported."""
    gc.collect()
    gc.freeze()
