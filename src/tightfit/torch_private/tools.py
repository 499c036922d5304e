"""PyTorch's other tools around a call: Dynamo, torch.func, exports. Private names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo import eval_frame as _dynamo_frames
from torch.autograd import forward_ad

__all__ = ["hide_from_dynamo", "is_exported", "running_transform", "without_dynamo"]


def is_exported() -> bool:
    """Whether another tool records the operators that run: torch.jit.trace or torch.export."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def running_transform() -> str:
    """Return what differentiates or maps the code that runs, instead of autograd; "" if nothing."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    return "forward-mode differentiation" if forward_ad._current_level >= 0 else ""


def hide_from_dynamo(function: Any) -> None:
    """Let Dynamo neither compile a function nor trace through a call of it."""
    function._torchdynamo_disable = True
    _dynamo_frames.skip_code(function.__code__)


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Let Dynamo leave alone what is called, as ``torch.compiler.disable`` does, not loading it."""
    before = _dynamo_frames.set_eval_frame(None)
    try:
        yield
    finally:
        _dynamo_frames.set_eval_frame(before)
