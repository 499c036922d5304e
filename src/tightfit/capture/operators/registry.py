"""Operators that are traced differently from how PyTorch's tracer does it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tightfit.capture.operators.dropout import traced_dropout
from tightfit.capture.operators.linalg import traced_checks
from tightfit.capture.operators.recurrent import traced_cells
from tightfit.capture.operators.zeros import traced_zeros


@contextlib.contextmanager
def traced_operators() -> Iterator[None]:
    """Trace operators as ops of a plan that the tracer alone refuses or computes differently."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(traced_cells())
        stack.enter_context(traced_dropout())
        stack.enter_context(traced_checks())
        stack.enter_context(traced_zeros())
        yield
