"""Comparisons over many graphs, budgets and planners: restartable, on one machine or several.

Every job is known by a hash of its whole content, and its row is a file named by this hash. A sweep
runs the jobs whose rows are missing, here or on the workers of a Dask cluster.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tightfit.errors import BadInput, MissingExtra
from tightfit.files import write_atomically
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.compare import ComparisonRow, compared
from tightfit.progress import SILENT, Progress, shown

_FORMAT = 1


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One planner on one task within limits."""

    task: Task
    planner: str
    limits: Limits

    def key(self) -> str:
        """A hash of everything the row depends on, and of nothing else."""
        content = msgspec.msgpack.encode((_FORMAT, self))
        return hashlib.blake2b(content, digest_size=16).hexdigest()


def run_job(payload: bytes) -> bytes:
    """Run an encoded job and return its encoded row; workers of a cluster call this."""
    job = msgspec.msgpack.decode(payload, type=Job)
    return msgspec.json.encode(compared(job.task, job.planner, job.limits))


def sweep(
    jobs: Sequence[Job], results: Path, *, scheduler: str | None = None, progress: Progress = SILENT
) -> tuple[ComparisonRow, ...]:
    """Run the jobs whose rows are not there yet; return all rows in the order of the jobs.

    `jobs`: to be run; equal jobs run once. `results`: a folder with one file per row. An
    interrupted sweep goes on where it stopped. `scheduler`: address of a Dask scheduler, or
    ``"local:N"`` for N worker processes on this machine; None: one job after the other in this
    process. `progress`: shows finished jobs. Raises `MissingExtra` if a scheduler is given and
    Dask is not installed. Raises `BadInput` if the scheduler's address cannot be read or a result
    file is damaged.
    """
    files = [results / f"{job.key()}.json" for job in jobs]
    missing = {
        file: msgspec.msgpack.encode(job)
        for file, job in zip(files, jobs, strict=True)
        if not file.exists()
    }
    results.mkdir(parents=True, exist_ok=True)
    with shown(progress, "sweep", len(missing)):
        for done, (file, row) in enumerate(_run(missing, scheduler), 1):
            write_atomically(file, row)
            progress.update(done)
    return tuple(map(_read, files))


def _run(payloads: dict[Path, bytes], scheduler: str | None) -> Iterator[tuple[Path, bytes]]:
    """Yield (file, encoded row) as jobs finish."""
    if scheduler is None:
        for file, payload in payloads.items():
            yield file, run_job(payload)
    elif payloads:
        yield from _run_on_dask(payloads, scheduler)


def _run_on_dask(payloads: dict[Path, bytes], scheduler: str) -> Iterator[tuple[Path, bytes]]:
    if importlib.util.find_spec("distributed") is None:
        raise MissingExtra("a sweep on a cluster needs Dask: pip install tightfit[distributed]")
    import distributed

    dask: Any = distributed
    with dask.Client(**_client_options(scheduler)) as client:
        files = {
            client.submit(run_job, payload, key=file.stem): file
            for file, payload in payloads.items()
        }
        finished: Iterable[Any] = dask.as_completed(list(files))
        for future in finished:
            yield files[future], future.result()


def _client_options(scheduler: str) -> dict[str, Any]:
    """Keyword arguments of a Dask client for an address or ``"local:N"``."""
    if not scheduler.startswith("local"):
        return {"address": scheduler}
    _, colon, workers = scheduler.partition(":")
    if not colon or not workers.isdecimal() or int(workers) < 1:
        raise BadInput(
            f"the scheduler {scheduler!r} cannot be read: write local:2 for two workers here, or "
            "an address such as tcp://host:8786"
        )
    return {"n_workers": int(workers), "threads_per_worker": 1, "dashboard_address": None}


def _read(path: Path) -> ComparisonRow:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ComparisonRow)
    except msgspec.MsgspecError as error:
        raise BadInput(
            f"{path} is no row of a sweep ({error}): delete it to run it again"
        ) from None
