"""Operators that PyTorch tests itself with keep their bits in a fitted module: a sample of them."""

from __future__ import annotations

import pytest

from benchmarks.operators import cases

EVERY = 32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of operators, which are called in every way
def test_operators_have_the_bits_of_plain_pytorch() -> None:
    pytest.importorskip("expecttest", reason="PyTorch's own samples of operators import it")
    found = [*cases(1, every=EVERY)]
    assert not [case for case in found if case[2].startswith(("unequal", "error"))]
    assert sum(outcome == "equal" for *_, outcome in found) > 25
