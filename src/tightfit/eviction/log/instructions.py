"""The instructions of a log, one frozen class each; docs/simulator.md has the text format.

Sizes are bytes; times are integer nanoseconds, as the text has them, so that sums are exact.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Constant(NamedTuple):
    """A tensor that exists already, such as a parameter: resident for ever."""

    name: str
    size_bytes: int


class Result(NamedTuple):
    """An output of a call; `alias` is the argument whose storage it shares, None for its own."""

    name: str
    size_bytes: int
    alias: int | None = None


class Call(NamedTuple):
    """A pure operator call."""

    operator: str
    arguments: tuple[str, ...]
    results: tuple[Result, ...]
    time_ns: int


class Mutate(NamedTuple):
    """An operator call in place; `mutated` are the positions of the arguments it overwrites."""

    operator: str
    arguments: tuple[str, ...]
    mutated: tuple[int, ...]
    time_ns: int


class Copy(NamedTuple):
    """`name` is a further name of the tensor that is called `source`."""

    name: str
    source: str


class CopyFrom(NamedTuple):
    """`name`, which exists, is now a name of the tensor that is called `source`."""

    name: str
    source: str


class Release(NamedTuple):
    """The program dropped a name."""

    name: str


class Backward(NamedTuple):
    """The backward pass begins."""


Instruction: TypeAlias = Constant | Call | Mutate | Copy | CopyFrom | Release | Backward
