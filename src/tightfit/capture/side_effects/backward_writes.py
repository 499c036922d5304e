"""Members of modules that code of the backward uses: hooks, and functions that checkpoint.

The tracer puts stand-ins in the place of parameters and buffers only while the forward runs. Code
that runs in backward (a hook, a checkpoint that runs a module again) would read the real tensors.
Here it reads the stand-ins, too, so that the trace sees it. A buffer that is written there is
refused by name: it would be written at capture and never again. So is a tensor that the forward
returns or leaves in an attribute, and that code of the backward changes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from tightfit.errors import CaptureError
from tightfit.torch_private.partitioning import backward_nodes

__all__ = ["StandInsInBackward", "refuse_backward_writes"]

aten = torch.ops.aten


class StandInsInBackward(TorchFunctionMode):
    """Lets the modules keep the stand-ins of their members also while gradients are traced.

    `asked`: called with which outputs and inputs gradients are to be traced, before they are;
    returns for each output whether it may receive one.
    """

    def __init__(
        self, module: nn.Module, asked: Callable[[Sequence[Any], Sequence[Any]], Sequence[bool]]
    ) -> None:
        super().__init__()
        self._asked = asked
        self._is_awaited = False
        modules = dict(module.named_modules(remove_duplicate=False))
        self._buffers = {name: each._buffers for name, each in modules.items() if each._buffers}
        self._parameters = [each._parameters for each in modules.values() if each._parameters]
        self._stand_ins: dict[str, dict[str, Any]] = {}
        self._weights: list[dict[str, Any]] = []

    def note(self) -> None:
        """Remember the members, as a traced forward begins."""
        self._is_awaited = False
        self._stand_ins = {name: dict(buffers) for name, buffers in self._buffers.items()}
        self._weights = [dict(parameters) for parameters in self._parameters]

    def await_gradients(self) -> None:
        """Note that the traced forward has ended: derivatives it took itself were its own."""
        self._is_awaited = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.autograd.grad or not self._is_awaited:
            return func(*args, **(kwargs or {}))
        return self._traced(*args, **(kwargs or {}))

    def _traced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], grad_outputs: Sequence[Any], **how: Any
    ) -> Any:
        receives = self._asked(outputs, inputs)
        every = zip(outputs, grad_outputs, receives, strict=True)
        given = [(output, gradient) for output, gradient, may in every if may]
        if not given:
            return (None,) * len(inputs)
        before = {name: dict(buffers) for name, buffers in self._buffers.items()}
        weights = [dict(parameters) for parameters in self._parameters]
        self._put(self._stand_ins, self._weights)
        try:
            kept, gradients = zip(*given, strict=True)
            return torch.autograd.grad(kept, inputs, gradients, **how)
        finally:
            changed = self._changed()
            self._put(before, weights)
            if changed:
                _refuse(changed)

    def _put(
        self, members: Mapping[str, Mapping[str, Any]], weights: Sequence[Mapping[str, Any]]
    ) -> None:
        for name, buffers in members.items():
            self._buffers[name].update(buffers)
        for parameters, own in zip(self._parameters, weights, strict=False):
            parameters.update(own)

    def _changed(self) -> str:
        """Return the name of a buffer in whose place a hook has put another tensor, if one has."""
        for name, buffers in self._stand_ins.items():
            for key, tensor in buffers.items():
                if self._buffers[name].get(key) is not tensor:
                    return f"{name}.{key}"
        return ""


def refuse_backward_writes(module: fx.GraphModule, outputs: Iterable[Any]) -> None:
    """Refuse a traced step whose backward writes a buffer, or changes what the forward returns.

    `outputs`: those of the forward.
    """
    for node in module.graph.nodes:
        written = node.args[0] if node.target is aten.copy_.default else None
        if isinstance(written, fx.Node) and written.op == "placeholder":
            _refuse(getattr(written.meta.get("desc"), "target", str(written)))
    late = backward_nodes(module)
    if any(isinstance(output, fx.Node) and output in late for output in outputs):
        raise CaptureError(
            "the backward changes a tensor that the forward returns or leaves in an attribute (the "
            "backward of a torch.autograd.Function adds to it, say): a plan hands it over before "
            "that. Way out: keep such a tensor inside the forward"
        )


def _refuse(name: str) -> None:
    raise CaptureError(
        f"a hook writes the buffer {name!r} while gradients are computed: a planned step writes "
        "buffers in its forward only. Way out: write it in the forward, or in a hook on a "
        "parameter (register_post_accumulate_grad_hook), which runs as usual. Or keep the module "
        "with the hook out of the fitted part"
    )
