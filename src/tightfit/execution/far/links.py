"""How fast the link to far memory is: measured once on a machine, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import msgspec
import torch

from tightfit.errors import BadInput
from tightfit.execution.far.copier import Copier, reading, writing
from tightfit.execution.far.pinned import CudaStreams
from tightfit.files import cache_folder, write_atomically

_MEASURED_BYTES = 32 << 20  # at a time
_DEVICE_BYTES = 8 << 20  # the same on a GPU, whose memory others may need
_REPEATS = 4
_SHORT_BYTES = 4096
_SHORT_REPEATS = 20
_FORMAT = 1


class Link(msgspec.Struct, frozen=True):
    """How fast values are stored and loaded, while far memory is used as a step does."""

    store_bytes_per_s: float
    load_bytes_per_s: float
    latency_s: float


@lru_cache(maxsize=16)
def file_link(folder: Path, *, keeps: bool) -> Link:
    """Return how fast the link to a file in a folder is on this machine.

    `keeps`: whether measurements are kept on disk. Raises `BadInput` if no file can be made there.
    """
    refuse_without_file(folder)
    where = f"{_FORMAT} {platform.node()} {os.cpu_count()} {folder} {folder.stat().st_dev}"
    return _kept(where, lambda: _measured_file(folder), keeps=keeps)


@lru_cache(maxsize=16)
def pinned_link(device: torch.device, *, keeps: bool) -> Link:
    """Return how fast the link between a GPU and pinned memory of the host is."""
    where = f"{_FORMAT} {platform.node()} {torch.cuda.get_device_properties(device)}"
    return _kept(where, lambda: _measured_device(device), keeps=keeps)


def operator_threads(device_type: str) -> int:
    """Return by how much costs of operators exceed the time that they take.

    On the CPU they are the processor time of all threads together.
    """
    return torch.get_num_threads() if device_type == "cpu" else 1


def _kept(where: str, measured: Callable[[], Link], *, keeps: bool) -> Link:
    """Return the link that is kept for some circumstances; it is measured the first time."""
    digest = hashlib.blake2b(where.encode(), digest_size=12).hexdigest()
    path = cache_folder("links") / f"{digest}.json"
    if keeps:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Link)
        except (OSError, msgspec.MsgspecError):
            pass
    link = measured()
    if keeps:
        with contextlib.suppress(OSError, BadInput):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(link))
    return link


def _link(size: int, short_s: tuple[float, float], long_s: tuple[float, float]) -> Link:
    """Return a link by the times of a short and a long store and load."""
    latency_s = statistics.mean(short_s)
    store_s, load_s = (max(whole - latency_s, 1e-9) for whole in long_s)
    return Link(size / store_s, size / load_s, latency_s)


# -- a file ------------------------------------------------------------------------------------


def refuse_without_file(folder: Path) -> None:
    """Raise `BadInput` if no file can be made in a folder."""
    if not hasattr(os, "preadv"):
        raise BadInput("offload= needs a system with preadv (Linux or macOS): leave it out")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BadInput(
            f"no file can be made in {folder} ({error.strerror}), where offload= would keep "
            "values: name another folder, as tightfit.Offload(size, folder=...)"
        ) from error


def _measured_file(folder: Path) -> Link:
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
    return _link(_MEASURED_BYTES, (seconds[0], seconds[1]), (seconds[2], seconds[3]))


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


# -- a GPU -------------------------------------------------------------------------------------


def _measured_device(device: torch.device) -> Link:
    """Copy memory of a GPU to pinned memory and back, as a step does."""
    streams = CudaStreams(device)
    near = torch.zeros(_DEVICE_BYTES, dtype=torch.uint8, device=device)
    far = streams.pinned(_DEVICE_BYTES)
    before = streams.mark(streams.current())
    store = _short_and_long_s(streams, streams.stores, far, near, before)
    load = _short_and_long_s(streams, streams.loads, near, far, before)
    return _link(_DEVICE_BYTES, (store[0], load[0]), (store[1], load[1]))


def _short_and_long_s(
    streams: CudaStreams,
    stream: torch.cuda.Stream,
    target: torch.Tensor,
    source: torch.Tensor,
    before: torch.cuda.Event,
) -> tuple[float, float]:
    """Return the least seconds of a short copy and of a long one in a stream.

    Both are asked for while another runs, so the host's time for that does not count.
    """
    found: list[tuple[float, float]] = []
    streams.wait(stream, before)
    for _ in range(_REPEATS):
        streams.copy(stream, target, source)
        events = [streams.mark(stream, is_timed=True)]
        for size in (_SHORT_BYTES, len(target)):
            streams.copy(stream, target[:size], source[:size])
            events.append(streams.mark(stream, is_timed=True))
        stream.synchronize()
        first, second, third = events
        found.append((first.elapsed_time(second) / 1e3, second.elapsed_time(third) / 1e3))
    return min(short for short, _ in found), min(long for _, long in found)
