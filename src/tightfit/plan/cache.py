"""Plans kept on disk, so that the same step under the same budget is planned once."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path

import msgspec

from tightfit.errors import BadInput
from tightfit.files import (
    cache_folder,
    decode_record,
    encode_record,
    read_limited,
    write_atomically,
)
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Outcome
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.version import __version__

__all__ = ["PlanCache", "plan_key"]

_FORMAT = 1
_SUFFIX = ".json.gz"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cached outcome."""

    format: int = _FORMAT
    outcome: Outcome


def plan_key(
    graph: Graph, *, budget_bytes: int, gradients: Gradients, planner: str, limits: msgspec.Struct
) -> str:
    """Return a hash of everything that decides what a planner answers.

    Parameters
    ----------
    graph : Graph
        Counts with its fingerprint, costs, workspaces, constants and what user code holds.
    limits : Struct
        The planner's limits, such as `tightfit.planners.base.Limits`.
    """
    asked = (
        __version__,
        fingerprint(graph),
        [
            (variant.cost_s, variant.workspace_bytes)
            for op in graph.ops
            for alternative in op.alternatives
            for variant in alternative.variants
        ],
        [segment.outside_bytes for segment in graph.segments],
        graph.constant_bytes,
        budget_bytes,
        gradients,
        planner,
        limits,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=16).hexdigest()


class PlanCache:
    """A folder of outcomes, bounded in size; whatever is read from it is verified before use.

    Parameters
    ----------
    folder : Path or None
        Where; None: ``plans`` in the folder that ``TIGHTFIT_CACHE_DIR`` names, or in the
        platform's cache folder.
    largest_bytes : int
        The least recently used files go once the folder holds more.
    """

    def __init__(self, folder: Path | None = None, *, largest_bytes: int = 256 << 20) -> None:
        self.folder = cache_folder("plans") if folder is None else folder
        self.largest_bytes = largest_bytes

    def load(self, key: str, graph: Graph) -> Outcome | None:
        """Return the outcome stored under a key, or None.

        Its plan is verified against the graph, and its peak and overhead are computed anew. An
        entry that cannot be used is deleted with a warning.
        """
        path = self._path(key)
        if not path.exists():
            return None
        try:
            content = read_limited(path)
            outcome = decode_record(content, _Entry, source=str(path), newest=_FORMAT).outcome
            if outcome.plan is None:
                raise BadInput(f"{path} holds no plan")
            verify(outcome.plan, graph)
        except BadInput as error:
            warnings.warn(f"a cached plan is ignored and planned again: {error}", stacklevel=2)
            path.unlink(missing_ok=True)
            return None
        os.utime(path)
        result = simulate(graph, outcome.plan)
        return msgspec.structs.replace(
            outcome, overhead=result.overhead, peak_bytes=result.peak_bytes
        )

    def store(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome that has a plan; one without is not kept.

        A folder that cannot be written to gives a warning, not an error.
        """
        if outcome.plan is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(key), encode_record(_Entry(outcome=outcome)))
            self._shrink()
        except (BadInput, OSError) as error:
            warnings.warn(f"the plan is not cached: {error}", stacklevel=2)

    def _path(self, key: str) -> Path:
        return self.folder / (key + _SUFFIX)

    def _shrink(self) -> None:
        """Delete the least recently used entries until the folder is small enough."""
        entries = [(path.stat(), path) for path in self.folder.glob("*" + _SUFFIX)]
        total = sum(stat.st_size for stat, _ in entries)
        for stat, path in sorted(entries, key=lambda entry: (entry[0].st_mtime_ns, entry[1])):
            if total <= self.largest_bytes:
                return
            path.unlink(missing_ok=True)
            total -= stat.st_size
