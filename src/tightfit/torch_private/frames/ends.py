"""Where Dynamo ends a graph, and what Python has done until then. Private names of torch."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._dynamo.output_graph import OutputGraph

from tightfit.torch_private.frames.outermost import changed_variables

__all__ = ["End", "noting_ends"]


@dataclass(frozen=True)
class End:
    """The end of one graph.

    Parameters
    ----------
    reason : str
        Why Dynamo ends it; "" where the frame ends.
    frames : tuple of (str, int)
        The file and line of each call that Dynamo had followed there, the outermost first.
    acts : bool
        Whether Python has changed something that was there before, or has drawn a number.
    """

    reason: str
    frames: tuple[tuple[str, int], ...]
    acts: bool

    @property
    def is_of_sizes(self) -> bool:
        """Whether the values of a tensor decide how large another one is."""
        return self.reason.startswith(_OF_SIZES)


_OF_SIZES = (
    "Dynamic shape operator",
    "Attempted to use `torch.nn.functional.one_hot` with data-dependent output shape",
)
"""How the reasons begin that Dynamo gives."""


@contextlib.contextmanager
def noting_ends(note: Callable[[End], None]) -> Iterator[None]:
    """Tell of each end of a graph that this thread makes, before anything of it runs."""
    before = getattr(_THREAD, "note", None)
    _THREAD.note = note
    with _LOCK:
        _NOTES.append(note)
        OutputGraph.compile_subgraph = _note_and_compile  # type: ignore[method-assign]
    try:
        yield
    finally:
        _THREAD.note = before
        with _LOCK:
            _NOTES.remove(note)
            if not _NOTES:
                OutputGraph.compile_subgraph = _COMPILE_SUBGRAPH  # type: ignore[method-assign]


_THREAD = threading.local()
_LOCK = threading.Lock()
_COMPILE_SUBGRAPH: Any = OutputGraph.compile_subgraph
_NOTES: list[Callable[[End], None]] = []
"""Those that are told in any thread: two of them may follow at once, and end in any order."""


@functools.wraps(_COMPILE_SUBGRAPH)
def _note_and_compile(self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
    note = getattr(_THREAD, "note", None)
    if note is not None:
        frames = tuple((each.filename, each.lineno or 0) for each in reason.user_stack)
        acts = bool(
            changed_variables(self.side_effects)
            or self.side_effects.tensor_hooks
            or self.random_calls
        )
        note(End(reason.reason.strip() if reason.graph_break else "", frames, acts))
    return _COMPILE_SUBGRAPH(self, tx, reason, *args, **kwargs)
