"""Operators that are traced differently from how PyTorch's tracer does it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from tightfit.capture.operators.dropout import dropout
from tightfit.capture.operators.linalg import check_errors
from tightfit.capture.operators.recurrent import gru_cell
from tightfit.torch_private import core as private

aten = torch.ops.aten


def zeros(size: Any, **options: Any) -> torch.Tensor:
    """Return zeros with memory of their own.

    Autograd has a kind of tensor for gradients that are zero everywhere (of `sgn`, say). It has no
    memory and must not be written into.
    """
    return aten.zeros.default(size, **options)


_TRACED = {
    aten.gru_cell.default: gru_cell,
    aten.dropout.default: dropout,
    aten._linalg_check_errors.default: check_errors,
    aten._efficientzerotensor.default: zeros,
}
"""By operator: the function that is traced in its place."""


def traced_operators() -> AbstractContextManager[None]:
    """Trace operators as ops of a plan that the tracer alone refuses or computes differently."""
    return private.python_kernels(_TRACED)
