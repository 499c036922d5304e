"""The way out for a model that cannot be captured as a whole: planned block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tightfit.api.blocks import Blocks
from tightfit.api.candidates import has_blocks
from tightfit.capture.generators import GeneratorStates
from tightfit.errors import CaptureError, CompileError, NothingToTrain

if TYPE_CHECKING:
    from tightfit.api.session import Session

__all__ = ["run_in_blocks"]


def run_in_blocks(
    session: Session, reason: CaptureError, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call that cannot be planned as a whole block by block, and go on so.

    Raises
    ------
    CompileError
        If it was to be compiled.
    CaptureError
        The reason, if there is no block that can be planned; generators are then as before.
    """
    if isinstance(reason, NothingToTrain) or not has_blocks(session.modules, session.root):
        raise reason
    if session.options.compile:
        raise CompileError(
            f"{session.name} allows no single graph to compile: {reason}. Way out: compile=False "
            "plans it block by block"
        ) from reason
    before = GeneratorStates(session.modules)
    buffers = {b: b.clone() for m in session.modules.values() for b in m.buffers()}
    blocks = Blocks(session, reason)
    try:
        output = blocks(args, kwargs)
    except BaseException:
        before.restore()
        for buffer, value in buffers.items():
            buffer.copy_(value)
        session.guard = None
        raise
    session.blocks = blocks
    return output
