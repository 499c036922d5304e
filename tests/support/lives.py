"""What a fitted training loop has in common with the plain one."""

from __future__ import annotations

from benchmarks.training_loops.run import Life


def assert_trained_alike(plain: Life, fitted: Life) -> None:
    """Assert the same losses and parameters, and that no more was held than the budget."""
    assert not fitted.error
    assert fitted.losses == plain.losses and fitted.parameters == plain.parameters
    assert fitted.largest_bytes <= (fitted.budget_bytes or 0)
