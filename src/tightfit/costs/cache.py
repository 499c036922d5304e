"""Measurements kept on disk, so that the next process starts warm."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from tightfit.errors import BadInput
from tightfit.files import cache_folder, write_atomically

Record = TypeVar("Record", bound=msgspec.Struct)

_MOST_ENTRIES = 20_000


class _Entry(msgspec.Struct):
    used: int
    record: msgspec.Raw


_DECODER = msgspec.json.Decoder(dict[str, _Entry])


class Cache:
    """Records by text keys in one file per environment.

    Measurements under other circumstances never mix: the environment (device, threads,
    versions) names the file. A missing, damaged or unwritable file is an empty cache. Each file
    keeps the entries used most recently.

    `environment`: everything beyond the key that a record depends on. `folder`: default: ``costs``
    in the folder of `tightfit.files.cache_folder`. `most_entries`: how many entries the file may
    have.
    """

    def __init__(
        self, environment: str, folder: Path | None = None, most_entries: int = _MOST_ENTRIES
    ) -> None:
        self.path = (folder or cache_folder("costs")) / f"costs-{_digest(environment)}.json"
        self._most_entries = most_entries
        self._entries = self._read()
        self._changed = False

    def get(self, key: str, kind: type[Record]) -> Record | None:
        """Return the record of a key, or None if there is none that can be read as `kind`."""
        entry = self._entries.get(_digest(key))
        if entry is None:
            return None
        try:
            record = msgspec.json.decode(entry.record, type=kind)
        except msgspec.MsgspecError:
            return None
        entry.used = int(time.time())
        return record

    def put(self, key: str, record: msgspec.Struct) -> None:
        """Keep a record; it reaches the disk with `save`."""
        content = msgspec.Raw(msgspec.json.encode(record))
        self._entries[_digest(key)] = _Entry(used=int(time.time()), record=content)
        self._changed = True

    def save(self) -> None:
        """Write new records, together with those that other processes have written meanwhile."""
        if not self._changed:
            return
        merged = {**self._read(), **self._entries}
        newest = sorted(merged.items(), key=lambda item: item[1].used, reverse=True)
        kept = dict(newest[: self._most_entries])
        with contextlib.suppress(OSError, BadInput):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, msgspec.json.encode(kept))
            self._changed = False

    def _read(self) -> dict[str, _Entry]:
        try:
            return _DECODER.decode(self.path.read_bytes())
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
