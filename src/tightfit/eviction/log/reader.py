"""The text of a log, line by line and strict: every line is understood or refused by number."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

import msgspec

from tightfit.errors import BadInput
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
    Result,
)

_LONGEST_LINE_BYTES = 1 << 20
_MOST_DIGITS = 18
_GZIP = b"\x1f\x8b"


_Following = TypeVar("_Following", lines.Memory, lines.Alias)


def read_instructions(path: Path | str) -> Iterator[Instruction]:
    """Yield the instructions of a log from its START on; nothing else is held in memory.

    `path`: a text file, plain or compressed with gzip, of any name. Raises `BadInput`, which names
    the line, if the file cannot be read or ends too early. So does a line that is no instruction,
    an instruction whose lines do not follow it, or a malformed number. So does a name that is used
    before it is defined, or defined twice.
    """
    yield from _Reader(Path(path)).instructions()


class _Reader:
    """One pass over a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self.names: set[str] = set()
        self.decoder = msgspec.json.Decoder(lines.AnyLine)

    def instructions(self) -> Iterator[Instruction]:
        rest = self._lines()
        if not any(isinstance(x, lines.Annotate) and x.annotation == "START" for x in rest):
            self._refuse("the log has no ANNOTATE START; the replay would begin nowhere")
        for line in rest:
            instruction = self._instruction(line, rest)
            if instruction is not None:
                yield instruction

    def _instruction(
        self, line: lines.AnyLine, rest: Iterator[lines.AnyLine]
    ) -> Instruction | None:
        match line:
            case lines.Constant():
                size_bytes = self._size(rest, line.name)
                self._define(line.name)
                return Constant(line.name, size_bytes)
            case lines.Call():
                return self._call(line, rest)
            case lines.Mutate():
                self._use(*line.args)
                for position in line.mutate:
                    self._check_position(position, line.args)
                return Mutate(line.name, line.args, line.mutate, self._int(line.time, "TIME"))
            case lines.Copy():
                self._use(line.src)
                self._define(line.dst)
                return Copy(line.dst, line.src)
            case lines.CopyFrom():
                self._use(line.src, line.dst)
                return CopyFrom(line.dst, line.src)
            case lines.Release():  # a name from before START was never counted
                return Release(line.name) if line.name in self.names else None
            case lines.Annotate():
                return Backward() if line.annotation == "BACKWARD" else None
            case lines.Memory() | lines.Alias():
                self._refuse(
                    f"{_name(type(line))} of {line.name!r} belongs to no instruction before it"
                )

    def _call(self, call: lines.Call, rest: Iterator[lines.AnyLine]) -> Call:
        self._use(*call.args)
        time_ns = self._int(call.time, "TIME")
        results: list[Result] = []
        for name in call.result:
            size_bytes = self._size(rest, name)
            alias = self._next(rest, lines.Alias, name)
            shared = None if alias.alias == "-1" else self._int(alias.alias, "ALIAS")
            if shared is not None:
                self._check_position(shared, call.args)
            results.append(Result(name, size_bytes, shared))
        for name in call.result:
            self._define(name)
        return Call(call.name, call.args, tuple(results), time_ns)

    def _size(self, rest: Iterator[lines.AnyLine], name: str) -> int:
        return self._int(self._next(rest, lines.Memory, name).memory, "MEMORY")

    def _next(self, rest: Iterator[lines.AnyLine], kind: type[_Following], name: str) -> _Following:
        line = next(rest, None)
        expected = f"expected the {_name(kind)} line of {name!r}"
        if line is None:
            self._refuse(f"{expected}, but the log ends: it is cut off")
        if not isinstance(line, kind) or line.name != name:
            self._refuse(f"{expected}, but found {_name(type(line))}")
        return line

    def _define(self, name: str) -> None:
        if not name or name in self.names:
            self._refuse(f"the name {name!r} is {'defined twice' if name else 'empty'}")
        self.names.add(name)

    def _use(self, *names: str) -> None:
        for name in names:
            if name not in self.names:
                self._refuse(f"{name!r} is used before it is defined")

    def _check_position(self, position: int, arguments: tuple[str, ...]) -> None:
        if not 0 <= position < len(arguments):
            self._refuse(f"there is no argument {position} among {len(arguments)}")

    def _int(self, text: str, meaning: str) -> int:
        if not (text.isascii() and text.isdecimal()) or len(text) > _MOST_DIGITS:
            self._refuse(f"{meaning} {text[:40]!r} is no decimal integer of 0 or more")
        return int(text)

    def _lines(self) -> Iterator[lines.AnyLine]:
        try:
            with self._opened() as file:
                while content := file.readline(_LONGEST_LINE_BYTES + 1):
                    self.number += 1
                    if len(content) > _LONGEST_LINE_BYTES:
                        self._refuse("the line is longer than 1 MiB")
                    try:
                        yield self.decoder.decode(content)
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                        self._refuse(f"no instruction of a log: {error}")
        except (OSError, EOFError, zlib.error) as error:
            why = error.strerror if isinstance(error, OSError) else ""
            raise BadInput(f"cannot read {self.path}: {why or error}") from error

    def _opened(self) -> BinaryIO | gzip.GzipFile:
        with self.path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP
        return gzip.open(self.path) if is_gzip else self.path.open("rb")

    def _refuse(self, why: str) -> NoReturn:
        raise BadInput(f"{self.path}, line {self.number}: {why}")


def _name(kind: type[lines.AnyLine]) -> str:
    return str(kind.__struct_config__.tag)
