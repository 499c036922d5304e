"""The lines of a log's text, one frozen class each; docs/simulator.md has the format."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class _Line(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="upper", tag_field="INSTRUCTION"
):
    """One object of the text; its class is named by INSTRUCTION."""


class AnnotateLine(_Line, frozen=True, tag="ANNOTATE"):
    annotation: Literal["START", "BACKWARD"]


class ConstantLine(_Line, frozen=True, tag="CONSTANT"):
    name: str


class MemoryLine(_Line, frozen=True, tag="MEMORY"):
    name: str
    memory: str


class AliasLine(_Line, frozen=True, tag="ALIAS"):
    name: str
    alias: str


class CallLine(_Line, frozen=True, tag="CALL"):
    name: str
    args: tuple[str, ...]
    result: tuple[str, ...]
    time: str


class MutateLine(_Line, frozen=True, tag="MUTATE"):
    name: str
    args: tuple[str, ...]
    mutate: tuple[int, ...]
    time: str


class CopyLine(_Line, frozen=True, tag="COPY"):
    dst: str
    src: str


class CopyFromLine(_Line, frozen=True, tag="COPY_FROM"):
    dst: str
    src: str


class ReleaseLine(_Line, frozen=True, tag="RELEASE"):
    name: str


AnyLine: TypeAlias = (
    AnnotateLine
    | ConstantLine
    | MemoryLine
    | AliasLine
    | CallLine
    | MutateLine
    | CopyLine
    | CopyFromLine
    | ReleaseLine
)
