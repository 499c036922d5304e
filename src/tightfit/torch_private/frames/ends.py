"""Graph breaks of Dynamo, and side effects of Python until then. Private names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx
from torch._dynamo.output_graph import OutputGraph

from tightfit.torch_private.frames.outermost import changed_variables
from tightfit.torch_private.patches import Patch


@dataclass(frozen=True)
class End:
    reason: str  # why Dynamo ends it; "" where the frame ends
    # The file and line of each call that Dynamo had followed there, the outermost first
    frames: tuple[tuple[str, int], ...]
    acts: bool  # whether Python has changed something that was there before, or has drawn a number

    @property
    def is_of_sizes(self) -> bool:
        """Whether the values of a tensor decide how large another is."""
        return self.reason.startswith(_OF_SIZES)


_OF_SIZES = (
    "Dynamic shape operator",
    "Attempted to use `torch.nn.functional.one_hot` with data-dependent output shape",
)
"""How the reasons begin that Dynamo gives."""


@contextlib.contextmanager
def noting_ends(note: Callable[[End], None]) -> Iterator[None]:
    """Tell of each end of a graph that this thread makes, before anything of it runs."""

    def noted(go_on: Any, self: Any, tx: Any, reason: Any, *rest: Any, **more: Any) -> Any:
        frames = tuple((each.filename, each.lineno or 0) for each in reason.user_stack)
        acts = bool(
            changed_variables(self.side_effects)
            or self.side_effects.tensor_hooks
            or self.random_calls
        )
        note(End(reason.reason.strip() if reason.graph_break else "", frames, acts))
        return go_on(self, tx, reason, *rest, **more)

    with _COMPILE_SUBGRAPH.by(noted):
        yield


_REASONS = {
    "step_unsupported": "Dynamo does not support what follows there",
    "Reconstruction failure": "Dynamo cannot make a Python object there again",
}


def break_reason(module: fx.GraphModule) -> str:
    """Return why a graph ends before the callable does, and where; "" if it does not."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    why = _REASONS.get(reason.reason, reason.reason).strip().partition("\n")[0]
    if not reason.user_stack:
        return why
    at = reason.user_stack[-1]
    return f"{why} ({Path(at.filename).name}:{at.lineno}, in {at.name})"


_COMPILE_SUBGRAPH = Patch(OutputGraph, "compile_subgraph")
