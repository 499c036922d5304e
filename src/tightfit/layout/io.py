"""Files of blocks and layouts: CSV with a line per block, or strict JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tightfit.errors import BadInput
from tightfit.files import decode_record, encode_record, read_limited, write_atomically
from tightfit.layout.blocks import CPU_ALIGNMENT_BYTES, FORMAT, Block, Layout

LAYOUT_SUFFIXES = (".csv", ".csv.gz", ".json", ".json.gz")

_COLUMNS = ("id", "lower", "upper", "size")
_OFFSET = "offset"
_NO_HEADER: list[str] = []


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A JSON file: a layout, or blocks alone."""

    format: int
    blocks: tuple[Block, ...]
    offsets: tuple[int, ...] = ()
    alignment_bytes: int = CPU_ALIGNMENT_BYTES


def load_blocks(path: Path | str) -> tuple[Block, ...]:
    """Return the blocks of a ``.csv``, ``.csv.gz``, ``.json`` or ``.json.gz`` file.

    Raises `BadInput` if it cannot be read, a column or number is missing, a lifetime is empty, a
    size is negative, or two blocks share an id.
    """
    return _load(path).blocks


def load_layout(path: Path | str) -> Layout:
    """Return the layout in a file; `validate_layout` judges it.

    Raises `BadInput` as `load_blocks`; also if blocks have no offsets.
    """
    record = _load(path)
    if len(record.offsets) != len(record.blocks):
        raise BadInput(f"{path} has offsets for {len(record.offsets)} of its blocks: pack it first")
    return Layout(
        blocks=record.blocks, offsets=record.offsets, alignment_bytes=record.alignment_bytes
    )


def save_blocks(blocks: Iterable[Block], path: Path | str) -> None:
    """Write blocks without offsets, all or nothing."""
    record = _Record(format=FORMAT, blocks=tuple(blocks))
    write_atomically(path, _csv(record.blocks, ()) if _is_csv(path) else encode_record(record))


def save_layout(layout: Layout, path: Path | str) -> None:
    """Write a layout, all or nothing: in CSV the blocks with a column `offset`."""
    is_csv = _is_csv(path)
    write_atomically(path, _csv(layout.blocks, layout.offsets) if is_csv else encode_record(layout))


def _is_csv(path: Path | str) -> bool:
    name = Path(path).name
    if not name.endswith(LAYOUT_SUFFIXES):
        raise BadInput(f"{path} must end in {', '.join(LAYOUT_SUFFIXES[:-1])} or .json.gz")
    return ".json" not in name


def _load(path: Path | str) -> _Record:
    is_csv = _is_csv(path)
    content = read_limited(path)
    if is_csv:
        record = _from_csv(content, str(path))
    else:
        record = decode_record(content, _Record, source=str(path), newest=FORMAT)
    _check(record.blocks, str(path))
    return record


def _check(blocks: tuple[Block, ...], source: str) -> None:
    seen: set[int] = set()
    for block in blocks:
        if block.lower >= block.upper:
            raise BadInput(
                f"{source}: block {block.id} lives from {block.lower} to {block.upper}; a lifetime "
                "ends after it begins"
            )
        if block.size_bytes < 0:
            raise BadInput(f"{source}: block {block.id} has {block.size_bytes} bytes")
        if block.id in seen:
            raise BadInput(f"{source}: two blocks have the id {block.id}")
        seen.add(block.id)


def _from_csv(content: bytes, source: str) -> _Record:
    try:
        reader = csv.reader(io.StringIO(content.decode()), strict=True)
        header = [name.strip() for name in next(reader, _NO_HEADER)]
        missing = [name for name in _COLUMNS if name not in header]
        if missing:
            raise BadInput(
                f"{source} has no column {' and '.join(map(repr, missing))}; its first line must "
                f"be {','.join(_COLUMNS)}, with {_OFFSET} where blocks have places"
            )
        return _from_rows(header, reader, source)
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{source} is no CSV text: {error}") from error


def _from_rows(header: list[str], rows: Iterable[list[str]], source: str) -> _Record:
    places = [header.index(name) for name in _COLUMNS]
    offset = header.index(_OFFSET) if _OFFSET in header else None
    blocks: list[Block] = []
    offsets: list[int] = []
    for line, row in enumerate(rows, 2):
        if not row:
            continue
        try:
            blocks.append(Block(*(int(row[place]) for place in places)))
            if offset is not None:
                offsets.append(int(row[offset]))
        except (ValueError, IndexError) as error:
            raise BadInput(
                f"{source}, line {line}: {','.join(row)[:80]!r} has no whole number for each of "
                f"{','.join(header)}"
            ) from error
    return _Record(format=FORMAT, blocks=tuple(blocks), offsets=tuple(offsets))


def _csv(blocks: tuple[Block, ...], offsets: tuple[int, ...]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_COLUMNS, _OFFSET] if offsets else _COLUMNS)
    for position, block in enumerate(blocks):
        place = [offsets[position]] if offsets else []
        writer.writerow([block.id, block.lower, block.upper, block.size_bytes, *place])
    return out.getvalue().encode()
