"""Instructions as the text of a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tightfit.eviction.log.instructions import (
    Backward,
    Call,
    Constant,
    Copy,
    CopyFrom,
    Instruction,
    Mutate,
    Release,
    Result,
)
from tightfit.files import write_atomically


def write_log(path: Path | str, instructions: Iterable[Instruction]) -> None:
    """Write a log, all or nothing; compressed with gzip if the path ends in ``.gz``.

    Raises `BadInput` if the folder is missing or cannot be written.
    """
    write_atomically(path, log_text(instructions))


def log_text(instructions: Iterable[Instruction]) -> bytes:
    """Return the text of a log whose replay begins at the first instruction."""
    start = {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}
    lines = [start, *(line for instruction in instructions for line in _lines(instruction))]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _lines(instruction: Instruction) -> Iterator[dict[str, Any]]:
    match instruction:
        case Constant(name, size_bytes):
            yield {"INSTRUCTION": "CONSTANT", "NAME": name}
            yield _memory(name, size_bytes)
        case Call(operator, arguments, results, time_ns):
            yield {
                "INSTRUCTION": "CALL",
                "NAME": operator,
                "ARGS": arguments,
                "RESULT": [result.name for result in results],
                "TIME": str(time_ns),
            }
            for result in results:
                yield _memory(result.name, result.size_bytes)
                yield _alias(result)
        case Mutate(operator, arguments, mutated, time_ns):
            yield {
                "INSTRUCTION": "MUTATE",
                "NAME": operator,
                "ARGS": arguments,
                "MUTATE": mutated,
                "TIME": str(time_ns),
            }
        case Copy(name, source):
            yield {"INSTRUCTION": "COPY", "DST": name, "SRC": source}
        case CopyFrom(name, source):
            yield {"INSTRUCTION": "COPY_FROM", "DST": name, "SRC": source}
        case Release(name):
            yield {"INSTRUCTION": "RELEASE", "NAME": name}
        case Backward():
            yield {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"}


def _memory(name: str, size_bytes: int) -> dict[str, Any]:
    return {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size_bytes)}


def _alias(result: Result) -> dict[str, Any]:
    alias = -1 if result.alias is None else result.alias
    return {"INSTRUCTION": "ALIAS", "NAME": result.name, "ALIAS": str(alias)}
