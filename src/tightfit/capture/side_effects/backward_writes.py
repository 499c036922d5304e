"""Buffers that code of the backward writes, such as a hook: refused by name.

Such a buffer would be written at capture and never again.
"""

from __future__ import annotations

import torch
from torch import fx

from tightfit.errors import CaptureError

aten = torch.ops.aten


def refuse_backward_writes(graph: fx.Graph) -> None:
    """Refuse a traced step whose backward writes a buffer."""
    for node in graph.nodes:
        written = node.args[0] if node.target is aten.copy_.default else None
        if isinstance(written, fx.Node) and written.op == "placeholder":
            name = getattr(written.meta.get("desc"), "target", str(written))
            raise CaptureError(
                f"a hook writes the buffer {name!r} while gradients are computed: a planned step "
                "writes buffers in its forward only. Way out: write it in the forward, or in a "
                "hook on a parameter (register_post_accumulate_grad_hook), which runs as usual. "
                "Or keep the module with the hook out of the fitted part"
            )
