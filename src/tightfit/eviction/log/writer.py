"""Instructions as the text of a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

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
)
from tightfit.eviction.log.lines import (
    AliasLine,
    AnnotateLine,
    AnyLine,
    CallLine,
    ConstantLine,
    CopyFromLine,
    CopyLine,
    MemoryLine,
    MutateLine,
    ReleaseLine,
)
from tightfit.files import write_atomically


def write_log(path: Path | str, instructions: Iterable[Instruction]) -> None:
    """Write a log, all or nothing; compressed with gzip if the path ends in ``.gz``.

    Raises `BadInput` if the folder is missing or cannot be written.
    """
    write_atomically(path, log_text(instructions))


def log_text(instructions: Iterable[Instruction]) -> bytes:
    """Return the text of a log whose replay begins at the first instruction."""
    lines = [AnnotateLine("START"), *(line for each in instructions for line in _lines(each))]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _lines(instruction: Instruction) -> Iterator[AnyLine]:
    match instruction:
        case Constant(name, size_bytes):
            yield ConstantLine(name)
            yield MemoryLine(name, str(size_bytes))
        case Call(operator, arguments, results, time_ns):
            names = tuple(result.name for result in results)
            yield CallLine(operator, arguments, names, str(time_ns))
            for name, size_bytes, alias in results:
                yield MemoryLine(name, str(size_bytes))
                yield AliasLine(name, str(-1 if alias is None else alias))
        case Mutate(operator, arguments, mutated, time_ns):
            yield MutateLine(operator, arguments, mutated, str(time_ns))
        case Copy(name, source):
            yield CopyLine(name, source)
        case CopyFrom(name, source):
            yield CopyFromLine(name, source)
        case Release(name):
            yield ReleaseLine(name)
        case Backward():
            yield AnnotateLine("BACKWARD")
