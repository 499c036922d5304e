"""Files of traces: read and written, and never in the way of a step."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tightfit.capture.recall.values import NotKept
from tightfit.errors import BadInput
from tightfit.files import cache_folder, delete_least_used, read_limited, write_atomically

_LARGEST_BYTES = 128 << 20

_LOG = logging.getLogger(__name__)

Record = TypeVar("Record", bound=Any)


@contextlib.contextmanager
def ignoring_errors(consequence: str) -> Iterator[None]:
    """Log errors about a file of a trace: the step can still be traced."""
    try:
        yield
    except Exception as reason:
        _LOG.debug("%s: %s", consequence, reason or type(reason).__name__)


def trace_folder() -> Path:
    return cache_folder("traces")


def note_use(path: Path) -> None:
    """Note that a file was used: those not used for long are deleted first."""
    with contextlib.suppress(OSError):
        os.utime(path)


def read_trace(path: Path, kind: type[Record], version: int) -> Record:
    """Return the record that a file holds; a file that cannot be read is deleted.

    Raises `NotKept` if it cannot, or is of another version.
    """
    try:
        record = msgspec.msgpack.decode(read_limited(path), type=kind)
    except (BadInput, msgspec.MsgspecError) as error:
        path.unlink(missing_ok=True)
        raise NotKept(f"{path}, which cannot be read") from error
    if record.format != version:
        raise NotKept(f"{path}, which has another format")
    return record


def write_trace(path: Path, record: msgspec.Struct) -> None:
    """Write a record; files of its kind that were not used for long make room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.msgpack.encode(record))
    delete_least_used(path.parent, "*" + "".join(path.suffixes), _LARGEST_BYTES)
