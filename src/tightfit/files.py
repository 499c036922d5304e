"""Files that people and other programs give us: read within limits, written all or nothing."""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import sys
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from tightfit.errors import BadInput
from tightfit.units import format_bytes

LARGEST_FILE_BYTES = 128 << 20
LARGEST_CONTENT_BYTES = 256 << 20
_LARGEST_RECORDS = 2_000_000
_LARGEST_ITEMS = 20_000_000

Record = TypeVar("Record", bound=msgspec.Struct)


def cache_folder(kind: str) -> Path:
    """Return the folder for cached things of a kind, such as ``"plans"``; it may not exist yet.

    The environment variable ``TIGHTFIT_CACHE_DIR`` names the folder above it; without it, it is
    where the platform keeps caches.
    """
    if chosen := os.environ.get("TIGHTFIT_CACHE_DIR"):
        return Path(chosen).expanduser() / kind
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tightfit" / kind


def files_by_use(folder: Path, pattern: str) -> list[tuple[Path, int]]:
    """Return files of a folder with their sizes in bytes, those used last first.

    Files that another process deletes meanwhile are left out.
    """
    found: list[tuple[int, Path, int]] = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((stat.st_mtime_ns, path, stat.st_size))
    return [(path, size) for _, path, size in sorted(found, reverse=True)]


def delete_least_used(folder: Path, pattern: str, largest_bytes: int) -> None:
    """Delete the files used least recently until those of a folder are small enough together."""
    found = files_by_use(folder, pattern)
    total = sum(size for _, size in found)
    for path, size in reversed(found):
        if total <= largest_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


def write_atomically(path: Path | str, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    `content`: compressed with gzip (without a time stamp) if the path ends in ``.gz``. Raises
    `BadInput` if the folder is missing or cannot be written.
    """
    path = Path(path)
    if path.suffix == ".gz":
        content = gzip.compress(content, compresslevel=6, mtime=0)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(
            f"cannot write {path}: {error.strerror or error}; give a path in an existing folder "
            "that you may write to"
        ) from error


def read_limited(path: Path | str) -> bytes:
    """Return a file's content, decompressed if the path ends in ``.gz``.

    Raises `BadInput` if there is no such file, it cannot be read, is no gzip file although its name
    says so, or ends too early. So does a file larger than `LARGEST_FILE_BYTES` on disk or
    `LARGEST_CONTENT_BYTES` decompressed; sizes are checked before memory is spent.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise BadInput(f"{path} is a folder, not a file")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
            if len(content) > LARGEST_FILE_BYTES:
                size = max(len(content), path.stat().st_size)
                raise BadInput(
                    f"{path} has {format_bytes(size)}; files above "
                    f"{format_bytes(LARGEST_FILE_BYTES)} are refused"
                )
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    return _decompress(path, content) if path.suffix == ".gz" else content


def _decompress(path: Path, content: bytes) -> bytes:
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        plain = stream.decompress(content, LARGEST_CONTENT_BYTES + 1)
    except zlib.error as error:
        raise BadInput(f"{path} is no valid gzip file: {error}") from error
    if len(plain) > LARGEST_CONTENT_BYTES:
        raise BadInput(
            f"{path} decompresses to more than {format_bytes(LARGEST_CONTENT_BYTES)} and is refused"
        )
    if not stream.eof:
        raise BadInput(f"{path} is a truncated gzip file: copy or download it again")
    if stream.unused_data:
        raise BadInput(f"{path} has {len(stream.unused_data)} bytes after the end of its gzip data")
    return plain


def encode_record(record: msgspec.Struct) -> bytes:
    """Return a record as JSON text, its format first and each item of a list on its own line."""
    lines: list[bytes] = []
    for field in sorted(msgspec.structs.fields(record), key=lambda f: f.name != "format"):
        value = getattr(record, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if field.name != "format" and value == default:
            continue
        if isinstance(value, tuple) and value:
            items = cast("tuple[object, ...]", value)
            text = b"[\n" + b",\n".join(msgspec.json.encode(item) for item in items) + b"\n]"
        else:
            text = msgspec.json.encode(value)
        lines.append(msgspec.json.encode(field.encode_name) + b": " + text)
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


class _Header(msgspec.Struct):
    """The fields that are read before a file's records."""

    format: int | None = None
    values: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()

    @property
    def kind(self) -> str:
        """The kind of the file, as far as its fields tell."""
        if memoryview(self.instructions).nbytes:
            return "plan"
        return "graph" if memoryview(self.values).nbytes else "unknown"


def kind_of_record(content: bytes) -> str:
    """Return ``"plan"``, ``"graph"`` or ``"unknown"`` for a JSON text, by its fields."""
    try:
        return _decoder(_Header).decode(content).kind
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "unknown"


def decode_record(content: bytes, kind: type[Record], *, source: str, newest: int) -> Record:
    """Return the record that a JSON text describes.

    `kind`: the frozen class to read; unknown fields are refused. `source`: where the text comes
    from; named in errors. `newest`: the newest format this version reads. Raises `BadInput` if the
    text is no JSON, ends too early, or has a newer or no format. So does an unknown field, a field
    of the wrong type (with the path to it), or more records than any step has.
    """
    name = kind.__name__.lower()
    if content.count(b"{") > _LARGEST_RECORDS or content.count(b",") > _LARGEST_ITEMS:
        raise BadInput(
            f"{source} has more than {_LARGEST_RECORDS:,} records or {_LARGEST_ITEMS:,} items; "
            f"no {name} is that large, and it is refused"
        )
    try:
        header = _decoder(_Header).decode(content)
        if header.kind not in (name, "unknown"):
            raise BadInput(f"{source} is a {header.kind} file, not a {name}")
        if header.format is None:
            raise BadInput(f'{source} is no {name} file: it has no "format" field')
        if header.format < 1:
            raise BadInput(f"{source} has {name} format {header.format}; formats count from 1")
        if header.format > newest:
            raise BadInput(
                f"{source} has {name} format {header.format}, but this version of tightfit reads "
                f"up to {newest}: upgrade tightfit, or save the {name} again with this version"
            )
        return _decoder(kind).decode(content)
    except msgspec.ValidationError as error:
        raise BadInput(f"{source} is no valid {name}: {_explain(str(error))}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{source} is no complete JSON text: {error}") from error
    except RecursionError as error:
        raise BadInput(f"{source} is nested too deeply to be a {name}") from error


@lru_cache(maxsize=8)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _explain(message: str) -> str:
    """Explain an unknown instruction; pass other messages on, which name the field."""
    if "Invalid value" in message and ".do`" in message:
        return (
            message.replace("Invalid value", "unknown instruction")
            + " (this version knows compute, free, hand_over, enter, store and load)"
        )
    return message
