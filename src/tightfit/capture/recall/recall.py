"""Traces kept on disk: found again where all that they rest on is the same, kept for later."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import msgspec

from tightfit.capture.calls.signature import flatten
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.opaque.mark import opaque_modules
from tightfit.capture.reads.executed import Executed
from tightfit.capture.reads.guard import Reads
from tightfit.capture.recall.circumstances import circumstances
from tightfit.capture.recall.codes import KeptCode, found_again, kept_codes
from tightfit.capture.recall.naming import Naming, NotNamed
from tightfit.capture.recall.packing import KeptGraph, kept_graph, traced_again
from tightfit.capture.recall.trace_files import (
    note_use,
    read_trace,
    trace_folder,
    whatever_happens,
    write_trace,
)
from tightfit.capture.side_effects.attributes import KeptTensors
from tightfit.capture.trace.strides import TrueStrides
from tightfit.capture.traced_call import TracedCall
from tightfit.files import files_by_use
from tightfit.torch_private import core as private

__all__ = ["Recall"]

_FORMAT = 1
_SUFFIX = ".trace.gz"
_MOST_ALIKE = 4  # traces of the same circumstances, in which other things were read


class KeptTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A traced step and what it rests on besides its circumstances.

    Parameters
    ----------
    codes : list of KeptCode
        What ran.
    reads_environment : bool
        Whether that asked for a variable of the environment.
    reads : str
        A digest of all that it can have read.
    graph : KeptGraph
        The step.
    """

    format: int
    codes: list[KeptCode]
    reads_environment: bool
    reads: str
    graph: KeptGraph


@dataclasses.dataclass(frozen=True)
class Recall:
    """The traces that were kept for a call.

    Parameters
    ----------
    call : TracedCall
        What is about to be traced.
    key : str
        A digest of the circumstances.
    """

    call: TracedCall
    key: str

    @classmethod
    def of(cls, call: TracedCall, strides: TrueStrides | None) -> Recall | None:
        """Return what was kept for a call; None if no trace of it can be kept."""
        is_plain = call.answers is None and call.outside is None
        if not is_plain or isinstance(call.function, KeptTensors):
            return None
        if opaque_modules(call.modules, call.opaque):
            return None
        with whatever_happens("no trace is kept"):
            return cls(call, _digest(circumstances(call, strides)))
        return None

    def find(self) -> tuple[JointGraph, Reads] | None:
        """Return a trace that was kept, and what it has read; None if none holds now."""
        for path in self._paths():
            with whatever_happens(f"{path} is not used"):
                found = self._found(path)
                if found is not None:
                    note_use(path)
                    return found
        return None

    def _found(self, path: Path) -> tuple[JointGraph, Reads] | None:
        kept = read_trace(path, KeptTrace, _FORMAT)
        reads = self._reads(kept.codes, kept.reads_environment)
        if reads is None or self._named(reads) != kept.reads:
            return None
        joint = traced_again(kept.graph)
        leaves = flatten(self.call.args, self.call.kwargs)[0]
        return (joint, reads) if joint.decisions.hold(leaves, self.call.modules) else None

    def keep(self, joint: JointGraph, executed: Executed) -> None:
        """Keep a trace for other processes, if they can see whether it holds there."""
        with whatever_happens("no trace is kept"):
            if executed.asks_process:
                raise NotNamed("what this process was told of itself or of files")
            codes = list(kept_codes(executed))
            reads = self._reads(codes, executed.reads_environment)
            if reads is None:
                raise NotNamed("code that is not found again")
            named, graph = self._named(reads), kept_graph(joint)
            kept = KeptTrace(_FORMAT, codes, executed.reads_environment, named, graph)
            write_trace(trace_folder() / f"{self.key}-{named[:12]}{_SUFFIX}", kept)

    def _paths(self) -> list[Path]:
        """Return the files of the same circumstances, those used last first."""
        found = files_by_use(trace_folder(), f"{self.key}-*{_SUFFIX}")
        return [path for path, _ in found[:_MOST_ALIKE]]

    def _reads(self, codes: list[KeptCode], reads_environment: bool) -> Reads | None:
        """Return what some code can read now; None if it is not there."""
        call = self.call
        executed = found_again(
            codes, call.function, call.modules, reads_environment=reads_environment
        )
        if executed is None:
            return None
        given = tuple(private.pytree.tree_leaves((call.args, call.kwargs)))
        return Reads.of(executed, call.function, call.modules, given)

    def _named(self, reads: Reads) -> str:
        return _digest(Naming(self.call.modules).of(reads.held()))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=20).hexdigest()
