"""Instructions as the text of a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tightfit.eviction.log import lines
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
from tightfit.files import write_atomically


def write_log(path: Path | str, instructions: Iterable[Instruction]) -> None:
    """Write a log, all or nothing; compressed with gzip if the path ends in ``.gz``.

    Raises `BadInput` if the folder is missing or cannot be written.
    """
    write_atomically(path, log_text(instructions))


def log_text(instructions: Iterable[Instruction]) -> bytes:
    """Return the text of a log whose replay begins at the first instruction."""
    text = [lines.Annotate("START"), *(line for each in instructions for line in _lines(each))]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in text)


def _lines(instruction: Instruction) -> Iterator[lines.AnyLine]:
    match instruction:
        case Constant(name, size_bytes):
            yield lines.Constant(name)
            yield lines.Memory(name, str(size_bytes))
        case Call(operator, arguments, results, time_ns):
            names = tuple(result.name for result in results)
            yield lines.Call(operator, arguments, names, str(time_ns))
            for name, size_bytes, alias in results:
                yield lines.Memory(name, str(size_bytes))
                yield lines.Alias(name, str(-1 if alias is None else alias))
        case Mutate(operator, arguments, mutated, time_ns):
            yield lines.Mutate(operator, arguments, mutated, str(time_ns))
        case Copy(name, source):
            yield lines.Copy(name, source)
        case CopyFrom(name, source):
            yield lines.CopyFrom(name, source)
        case Release(name):
            yield lines.Release(name)
        case Backward():
            yield lines.Annotate("BACKWARD")
