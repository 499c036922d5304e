"""Measurements of the calls of a step: kept on disk, or made by running each distinct call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec

from tightfit.allocator.refusals import is_refusal, unless_refused
from tightfit.capture.captured import Call, Captured
from tightfit.capture.opaque.ops import OpaqueBackward, OpaqueForward
from tightfit.capture.stepping.predicted import PredictedOp
from tightfit.costs.cache import Cache
from tightfit.costs.measured.call import Footprint, Measurement, environment_of
from tightfit.pricing.keys import is_opaque, key_of, name_of
from tightfit.pricing.made import MadeByOps
from tightfit.pricing.synthetic import synthetic_arguments
from tightfit.progress import Progress
from tightfit.torch_private import core as private

Record = TypeVar("Record", bound=Footprint)

DOES_NOT_RUN = (RuntimeError, ValueError, IndexError)
"""Errors of an operator that does not take the arguments it is given to be measured."""

UNKNOWN = Footprint(  # of a call that was not run: it needs no workspace and is as traced
    workspace_bytes=0, output_bytes=(), output_strides=(), aliases=(), none_outputs=()
)


class Brief(Measurement, frozen=True, kw_only=True):
    """The measurement of one run of a call: its bytes exactly, its time roughly."""

    @classmethod
    def of(cls, run: Measurement) -> Brief:
        return cls(**msgspec.structs.asdict(run))


_SERVES: dict[type[Footprint], tuple[type[Footprint], ...]] = {
    Footprint: (Footprint, Measurement, Brief),
    Measurement: (Measurement,),
    Brief: (Measurement, Brief),
}
"""Which records answer a question for one of a kind, the best first."""


def recorded(
    captured: Captured,
    calls: Iterable[Call],
    kind: type[Record],
    measure: Callable[..., Record],
    progress: Progress,
) -> dict[str, Record]:
    """Return a record of a kind for the key of every call, from the disk cache or measured.

    Calls are left out for which the budget has no room, or that refuse drawn numbers: lengths that
    must sum up, say, or factors of a matrix.

    `calls`: of its ops; opaque modules are known in this process only. `kind`: `Footprint`,
    `Measurement` or `Brief`. `measure`: runs a function on arguments and returns such a record.
    `progress`: shows each call that is measured.
    """
    device = captured.joint.device
    cache = Cache(environment_of(device))
    wanted = {key_of(call): call for call in calls}
    known = {key: record for key in wanted if (record := _kept(cache, key, kind)) is not None}
    made = MadeByOps(captured, device)
    for key, record in known.items():
        made.note(key, wanted[key], record)
    missing = [(key, call) for key, call in wanted.items() if key not in known]
    if not missing:
        return known
    progress.start("measuring operators", len(missing))
    try:
        for done, (key, call) in enumerate(missing):
            progress.update(done, name_of(call.function))
            if is_opaque(call):
                known[key] = _of_opaque(call.function, kind)
                continue
            record = unless_refused(partial(_measured, captured, call, measure, made))
            if record is None:
                continue  # it is priced by others
            known[key] = record
            made.note(key, call, record)
            keep(cache, key, record)
    finally:
        cache.save()
        progress.stop()
    return known


def _measured(
    captured: Captured, call: Call, measure: Callable[..., Record], made: MadeByOps
) -> Record | None:
    args, kwargs = synthetic_arguments(captured.joint.module, call, made)
    try:
        with private.without_autocast():
            return measure(call.function, args, kwargs, device=captured.joint.device)
    except DOES_NOT_RUN as error:
        if is_refusal(error):
            raise
        return None


def keep(cache: Cache, key: str, record: Footprint) -> None:
    """Keep the cost of the calls of a key on disk, for `recorded` to return."""
    cache.put(f"{type(record).__name__}\n{key}", record)


def _kept(cache: Cache, key: str, kind: type[Record]) -> Record | None:
    """Return the kept cost of a call, if it serves."""
    for name in _SERVES[kind]:
        record = cache.get(f"{name.__name__}\n{key}", kind)
        if record is not None:
            return record
    return None


def _of_opaque(
    function: OpaqueForward | OpaqueBackward | PredictedOp, kind: type[Record]
) -> Record:
    """Return the cost of a call that names it itself; it is known in this process only."""
    measured = function.measure(briefly=kind is not Measurement)
    return kind(**{name: getattr(measured, name) for name in kind.__struct_fields__})
