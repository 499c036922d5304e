"""What code of the backward writes, such as a hook: refused by name.

A buffer that is written there would be written at capture and never again. A tensor that the
forward returns, changes or leaves in an attribute would be handed over before it is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tightfit.errors import CaptureError
from tightfit.torch_private.partitioning import backward_nodes

aten = torch.ops.aten


def refuse_backward_writes(module: fx.GraphModule, outputs: Iterable[Any]) -> None:
    """Refuse a traced step whose backward writes a buffer, or changes what the forward returns.

    `outputs`: those of the forward, and the new content of inputs that it changes.
    """
    for node in module.graph.nodes:
        written = node.args[0] if node.target is aten.copy_.default else None
        if isinstance(written, fx.Node) and written.op == "placeholder":
            name = getattr(written.meta.get("desc"), "target", str(written))
            raise CaptureError(
                f"a hook writes the buffer {name!r} while gradients are computed: a planned step "
                "writes buffers in its forward only. Way out: write it in the forward, or in a "
                "hook on a parameter (register_post_accumulate_grad_hook), which runs as usual. "
                "Or keep the module with the hook out of the fitted part"
            )
    late = backward_nodes(module)
    if any(isinstance(output, fx.Node) and output in late for output in outputs):
        raise CaptureError(
            "the backward changes a tensor that the forward returns, changes or leaves in an "
            "attribute (the backward of a torch.autograd.Function adds to it, say): a plan hands "
            "it over before that. Way out: keep such a tensor inside the forward"
        )
