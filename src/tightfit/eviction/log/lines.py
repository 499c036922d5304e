"""The lines of a log's text, one frozen class each; docs/simulator.md has the format."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class _Line(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="upper", tag_field="INSTRUCTION"
):
    """One object of the text; its class is named by INSTRUCTION."""


class Annotate(_Line, frozen=True, tag="ANNOTATE"):
    annotation: Literal["START", "BACKWARD"]


class Constant(_Line, frozen=True, tag="CONSTANT"):
    name: str


class Memory(_Line, frozen=True, tag="MEMORY"):
    name: str
    memory: str


class Alias(_Line, frozen=True, tag="ALIAS"):
    name: str
    alias: str


class Call(_Line, frozen=True, tag="CALL"):
    name: str
    args: tuple[str, ...]
    result: tuple[str, ...]
    time: str


class Mutate(_Line, frozen=True, tag="MUTATE"):
    name: str
    args: tuple[str, ...]
    mutate: tuple[int, ...]
    time: str


class Copy(_Line, frozen=True, tag="COPY"):
    dst: str
    src: str


class CopyFrom(_Line, frozen=True, tag="COPY_FROM"):
    dst: str
    src: str


class Release(_Line, frozen=True, tag="RELEASE"):
    name: str


AnyLine: TypeAlias = (
    Annotate | Constant | Memory | Alias | Call | Mutate | Copy | CopyFrom | Release
)
