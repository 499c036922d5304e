"""Far memory as a user asks for it, and how fast the link to it is: measured once, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec

from tightfit.errors import BadInput
from tightfit.execution.far.copier import Copier, reading, writing
from tightfit.files import cache_folder, write_atomically
from tightfit.plan.plan import Far
from tightfit.units import parse_bytes

_MEASURED_BYTES = 32 << 20  # at a time
_REPEATS = 4
_SHORT_BYTES = 4096
_SHORT_REPEATS = 20
_FORMAT = 1


@dataclass(frozen=True)
class Offload:
    """Memory that a plan may move values to: a file in a folder, without a name.

    Parameters
    ----------
    size : int or str
        How much a step may hold there: bytes, or text such as ``"16GiB"``.
    folder : str or Path, optional
        Where the file is, on a disk with that much room. Default: the folder that ``TMPDIR`` names,
        or ``/var/tmp``.
    optimizer_state : bool
        With ``update_in_backward=True``: whether the large tensors of the optimizer's state are
        there, too, from the first step on. They stay there when the model is no longer fitted.

    Examples
    --------
    >>> tightfit.fit(model, "8GiB", offload=tightfit.Offload("16GiB", folder="/scratch"))
    """

    size: int | str
    folder: str | Path | None = None
    optimizer_state: bool = False

    def __post_init__(self) -> None:
        """Refuse a size that is none, and a folder in which no file can be made."""
        parse_bytes(self.size, what="offload")
        if not hasattr(os, "preadv"):
            raise BadInput("offload= needs a system with preadv (Linux or macOS): leave it out")
        try:
            tempfile.TemporaryFile(dir=self.place).close()
        except OSError as error:
            raise BadInput(
                f"no file can be made in {self.place} ({error.strerror}), where offload= would "
                "keep values: name another folder, as tightfit.Offload(size, folder=...)"
            ) from error

    @cached_property  # asked for at every store
    def size_bytes(self) -> int:
        return parse_bytes(self.size, what="offload")

    @cached_property  # asked for in every step
    def place(self) -> Path:
        if self.folder is not None:
            return Path(self.folder).expanduser().resolve()
        usual = Path("/var/tmp")
        return usual if usual.is_dir() and "TMPDIR" not in os.environ else _temporary()

    def far(self, threads: int = 1, *, keeps: bool = True, taken_bytes: int = 0) -> Far:
        """Return it as planners know it.

        `threads`: of operators: their costs are the processor time of all of them together, so a
        second of a transfer is as long as that of so many. `keeps`: whether measurements of the
        link are kept on disk. `taken_bytes`: bytes in the file in every step.
        """
        link = _link(self.place, keeps=keeps)
        return Far(
            capacity_bytes=self.size_bytes - taken_bytes,
            store_bytes_per_s=link.store_bytes_per_s / threads,
            load_bytes_per_s=link.load_bytes_per_s / threads,
            latency_s=link.latency_s * threads,
        )


def _temporary() -> Path:
    return Path(tempfile.gettempdir()).resolve()


class _Link(msgspec.Struct, frozen=True):
    """How fast a file is written and read, while it is used as a step does."""

    store_bytes_per_s: float
    load_bytes_per_s: float
    latency_s: float


@lru_cache(maxsize=16)
def _link(folder: Path, *, keeps: bool) -> _Link:
    """Return how fast the link to a folder is on this machine, measured the first time."""
    where = f"{_FORMAT} {platform.node()} {os.cpu_count()} {folder} {folder.stat().st_dev}"
    digest = hashlib.blake2b(where.encode(), digest_size=12).hexdigest()
    path = cache_folder("links") / f"{digest}.json"
    if keeps:
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Link)
        except (OSError, msgspec.MsgspecError):
            pass
    link = _measured(folder)
    if keeps:
        with contextlib.suppress(OSError, BadInput):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(link))
    return link


def _measured(folder: Path) -> _Link:
    """Write a file and read it back, as a step does."""
    memory = mmap.mmap(-1, _MEASURED_BYTES)
    memory.write(b"1" * _MEASURED_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        stores = Copier(writing(file.fileno()), "tightfit far memory, stores")
        loads = Copier(reading(file.fileno()), "tightfit far memory, loads")
        try:
            _least_s(stores, memory, _MEASURED_BYTES, _REPEATS)
            os.ftruncate(file.fileno(), 0)  # pages freed by an earlier step are available at once
            seconds = [
                _least_s(copier, memory, size, times)
                for size, times in ((_SHORT_BYTES, _SHORT_REPEATS), (_MEASURED_BYTES, _REPEATS))
                for copier in (stores, loads)
            ]
        finally:
            stores.close()
            loads.close()
    latency_s = statistics.mean(seconds[:2])
    store_s, load_s = (max(whole - latency_s, 1e-9) for whole in seconds[2:])
    return _Link(_MEASURED_BYTES / store_s, _MEASURED_BYTES / load_s, latency_s)


def _least_s(copier: Copier, memory: mmap.mmap, size: int, times: int) -> float:
    """Return the least seconds to copy so many bytes; each time others."""
    found: list[float] = []
    for number in range(times):
        began = time.perf_counter()
        transfer = copier.begin(memoryview(memory)[:size], [(number * size, size)])
        copier.wait(transfer)
        found.append(time.perf_counter() - began)
        if transfer.error is not None:
            raise BadInput(f"far memory cannot be used: {transfer.error}") from transfer.error
    return min(found)  # others may take processor time meanwhile
