"""Plans kept on disk, so that the same step under the same budget is planned once."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tightfit.errors import BadInput
from tightfit.files import (
    cache_folder,
    decode_record,
    delete_least_used,
    encode_record,
    read_limited,
    write_atomically,
)
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Far, Gradients, Outcome, Plan
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.version import __version__

_FORMAT = 1
_SUFFIX = ".json.gz"
_IMPORTED = "imported-"

_NEAR = 0.98
"""A plan for a budget smaller than this share of the requested budget would waste memory."""


class PlanKey(msgspec.Struct, frozen=True, kw_only=True):
    digest: str  # a hash of all that decides a planner's answer, measured costs among it
    # graph, device: the graph's fingerprint and the kind of its device: they decide which plans can
    # run
    graph: str = ""
    device: str = ""
    budget_bytes: int = 0  # the budget, constants included
    gradients: Gradients = "fresh"  # ``"fresh"`` or ``"accumulated"``
    planner: str = ""  # the planner that was asked
    name: str = ""  # the step's name, for people

    def __str__(self) -> str:
        return self.digest


class CachedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One outcome with its question."""

    outcome: Outcome
    key: PlanKey = PlanKey(digest="")
    format: int = _FORMAT


class CacheFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # by which it is named on the command line
    imported: bool  # whether it came from another's file, not from a search here
    size_bytes: int
    used_s: float
    entry: CachedPlan


def plan_key(
    graph: Graph,
    *,
    budget_bytes: int,
    gradients: Gradients,
    planner: str,
    limits: msgspec.Struct,
    far: Far | None = None,
) -> PlanKey:
    """Return the cache key of a plan of a graph.

    `graph`: counts with its fingerprint, costs, workspaces, constants and memory of user code.
    `limits`: the planner's limits, such as `tightfit.planners.base.Limits`.
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
        *([] if far is None else [far]),
    )
    named = planner if far is None else f"{planner}, far memory"
    return _key(graph, asked, budget_bytes, gradients, named)


def role_key(
    graph: Graph, *, role: str, gradients: Gradients, budget_bytes: int | None = None
) -> PlanKey:
    """Return the cache key of a plan by its use, independent of costs.

    `budget_bytes`: the user's, if that matters.
    """
    asked = __version__, fingerprint(graph), role, gradients, budget_bytes
    return _key(graph, asked, budget_bytes or 0, gradients, role)


def _key(
    graph: Graph, asked: tuple[object, ...], budget_bytes: int, gradients: Gradients, planner: str
) -> PlanKey:
    """Return the key of a plan; `asked`: all that decides about it."""
    return PlanKey(
        digest=hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=16).hexdigest(),
        graph=fingerprint(graph),
        device=graph.device.kind,
        budget_bytes=budget_bytes,
        gradients=gradients,
        planner=planner,
        name=graph.name,
    )


class PlanCache:
    """A folder of outcomes, bounded in size; all that is read from it is verified before use.

    `folder`: where; None: ``plans`` in the folder that ``TIGHTFIT_CACHE_DIR`` names, or in the
    platform's cache folder. `largest_bytes`: the least recently used files go once the folder holds
    more.
    """

    def __init__(self, folder: Path | None = None, *, largest_bytes: int = 256 << 20) -> None:
        self.folder = cache_folder("plans") if folder is None else folder
        self.largest_bytes = largest_bytes

    def load(self, key: PlanKey, graph: Graph) -> Outcome | None:
        """Return the outcome stored under a key, or None.

        Its plan is verified against the graph, and its peak and overhead are computed again. An
        entry that cannot be used is deleted with a warning. Where this machine has planned no such
        step, an imported plan of the same graph, device and budget serves, if it fits.
        """
        path = self._path(key.digest)
        if not path.exists():
            return self._imported(key, graph)
        try:
            outcome = _read(path).outcome
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

    def recall(self, key: PlanKey) -> Plan | None:
        """Return the plan stored under a key, unverified, or None."""
        path = self._path(key.digest)
        try:
            plan = _read(path).outcome.plan if path.exists() else None
        except BadInput:
            path.unlink(missing_ok=True)
            return None
        if plan is not None:
            os.utime(path)
        return plan

    def store(self, key: PlanKey, outcome: Outcome) -> None:
        """Keep an outcome if it has a plan.

        A folder that cannot be written to gives a warning, not an error.
        """
        if outcome.plan is None:
            return
        try:
            self._write(key.digest, CachedPlan(outcome=outcome, key=key))
        except (BadInput, OSError) as error:
            warnings.warn(f"the plan is not cached: {error}", stacklevel=2)

    def kept(self) -> tuple[CacheFile, ...]:
        """Return the files kept, used last first; unreadable files are left out."""
        found: list[CacheFile] = []
        for path in self.folder.glob("*" + _SUFFIX):
            try:
                entry, stat = _read(path), path.stat()
            except (BadInput, OSError):
                continue
            name = path.name.removesuffix(_SUFFIX)
            found.append(
                CacheFile(
                    name=name,
                    imported=name.startswith(_IMPORTED),
                    size_bytes=stat.st_size,
                    used_s=stat.st_mtime,
                    entry=entry,
                )
            )
        return tuple(sorted(found, key=lambda file: (-file.used_s, file.name)))

    def remove(self, names: Iterable[str]) -> int:
        """Delete the files with these names; return how many there were."""
        paths = [self._path(name) for name in names]
        there = [path for path in paths if path.exists()]
        for path in there:
            path.unlink(missing_ok=True)
        return len(there)

    def take_in(self, plans: Iterable[CachedPlan]) -> int:
        """Keep plans that were found elsewhere; return how many.

        They are verified when they are used, against the graph of the step.

        Raises `BadInput` if the folder cannot be written to.
        """
        entries = tuple(plans)
        for entry in entries:
            digest = hashlib.blake2b(encode_record(entry), digest_size=8).hexdigest()
            name = f"{_imported_prefix(entry.key)}{digest}"
            try:
                self._write(name, entry)
            except OSError as error:
                raise BadInput(f"cannot write to {self.folder}: {error.strerror}") from error
        return len(entries)

    def _imported(self, key: PlanKey, graph: Graph) -> Outcome | None:
        """Return the cheapest imported plan that fits, made for nearly this budget."""
        fitting: list[Outcome] = []
        for path in sorted(self.folder.glob(f"{_imported_prefix(key)}*{_SUFFIX}")):
            try:
                entry = _read(path)
                outcome = _judged(entry, key, graph)
            except BadInput:  # damaged, or costs more bytes here than there: this plan does not do
                continue
            if outcome is not None:
                fitting.append(outcome)
        return min(fitting, key=lambda outcome: outcome.overhead, default=None)

    def _write(self, name: str, entry: CachedPlan) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(name), encode_record(entry))
        delete_least_used(self.folder, "*" + _SUFFIX, self.largest_bytes)

    def _path(self, name: str) -> Path:
        return self.folder / (name + _SUFFIX)


def _read(path: Path) -> CachedPlan:
    return decode_record(read_limited(path), CachedPlan, source=str(path), newest=_FORMAT)


def _imported_prefix(key: PlanKey) -> str:
    return f"{_IMPORTED}{key.graph}-{key.device}-"


def _judged(entry: CachedPlan, key: PlanKey, graph: Graph) -> Outcome | None:
    """Return the outcome of an imported plan here; None if it answers another question.

    Raises `InvalidPlan` if it does not fit.
    """
    plan, other = entry.outcome.plan, entry.key
    same = (other.gradients, other.planner) == (key.gradients, key.planner)
    near = _NEAR * key.budget_bytes <= other.budget_bytes <= key.budget_bytes
    if plan is None or plan.far is not None or not same or not near:  # its link was another
        return None
    plan = msgspec.structs.replace(plan, budget_bytes=key.budget_bytes)
    verify(plan, graph)
    result = simulate(graph, plan)
    return msgspec.structs.replace(
        entry.outcome,
        plan=plan,
        overhead=result.overhead,
        peak_bytes=result.peak_bytes,
        bound=min(entry.outcome.bound, result.overhead),
        bound_source=f"{entry.outcome.bound_source}, with the costs of the machine it came from",
        status="feasible",
        note="imported",
    )
