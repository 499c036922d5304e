"""Training on several ranks: each check of `support.replicas` runs on two of them."""

from __future__ import annotations

import pytest

import support.replicas
from support.processes import run_ranks


@pytest.mark.slow
def test_data_parallel() -> None:
    assert run_ranks(support.replicas) == []
