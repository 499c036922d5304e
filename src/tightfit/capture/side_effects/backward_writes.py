"""Buffers that hooks write while gradients flow: a counter of steps, a norm of a gradient.

The tracer puts stand-ins in the place of buffers only while the forward runs. What hooks do to a
buffer in backward would reach the real one, at capture and never again; here they meet the
stand-in too, so that the trace sees it, and the step is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = ["StandInsInBackward", "refuse_backward_writes"]

aten = torch.ops.aten


class StandInsInBackward(TorchFunctionMode):
    """Lets the modules hold the stand-ins of buffers also while gradients are traced.

    Parameters
    ----------
    module : nn.Module
        That holds all members.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._holders = {
            name: child._buffers
            for name, child in module.named_modules(remove_duplicate=False)
            if child._buffers
        }
        self._stand_ins: dict[str, dict[str, Any]] = {}

    def note(self) -> None:
        """Remember what the buffers are, as a traced forward begins."""
        self._stand_ins = {name: dict(buffers) for name, buffers in self._holders.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.autograd.grad or not private.is_tracing():
            return func(*args, **(kwargs or {}))
        before = {name: dict(buffers) for name, buffers in self._holders.items()}
        self._put(self._stand_ins)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            changed = self._changed()
            self._put(before)
            if changed:
                _refuse(changed)

    def _put(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        for name, buffers in members.items():
            self._holders[name].update(buffers)

    def _changed(self) -> str:
        """Return the name of a buffer in whose place a hook has put another tensor, if one has."""
        for name, buffers in self._stand_ins.items():
            for key, tensor in buffers.items():
                if self._holders[name].get(key) is not tensor:
                    return f"{name}.{key}"
        return ""


def refuse_backward_writes(graph: fx.Graph) -> None:
    """Refuse a traced step whose backward writes a buffer."""
    for node in graph.nodes:
        written = node.args[0] if node.target is aten.copy_.default else None
        if isinstance(written, fx.Node) and written.op == "placeholder":
            _refuse(getattr(written.meta.get("desc"), "target", str(written)))


def _refuse(name: str) -> None:
    raise CaptureError(
        f"a hook writes the buffer {name!r} while gradients are computed: a planned step writes "
        "buffers in its forward only. Way out: write it in the forward, or in a hook on a "
        "parameter (register_post_accumulate_grad_hook), which runs as ever; or keep the module "
        "with the hook out of the fitted part"
    )
