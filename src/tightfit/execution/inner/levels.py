"""Which outputs of a call are computed from others, and leave it after these."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import ancestors_of
from tightfit.torch_private.wrappers import OutputType, receives_gradient

_OF_FUNCTION = OutputType.custom_function_view
_ITSELF = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.is_input)
"""Kinds of outputs that are views of nothing that code outside sees."""


@dataclass(frozen=True)
class Level:
    """Raw outputs that leave a call through one autograd node; none is computed from another.

    `reads`: raw outputs of earlier levels, or of none, that these are computed from.
    """

    outputs: tuple[int, ...]
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Levels:
    """How outputs leave a call: `levels` after all outputs that are computed from no others.

    `watched`: outputs that others are computed from, and that are no place for a derivative.
    """

    levels: tuple[Level, ...]
    watched: tuple[int, ...]

    @property
    def read(self) -> tuple[int, ...]:
        """The raw outputs that others are computed from."""
        return tuple(sorted({i for level in self.levels for i in level.reads}))


def levels_of(joint: JointGraph, leaving: Collection[int]) -> Levels:
    """Return the levels of a call's outputs.

    `leaving`: the raw outputs that leave the chain of nodes with a history, each once.
    """
    infos = joint.metadata.output_info
    received = {i for i, info in enumerate(infos) if receives_gradient(info)}
    if len(received) == 1:
        return Levels((), ())
    raw = joint.raw_outputs
    read_by = {i: ancestors_of(raw[i].all_input_nodes) for i in {*leaving, *received}}
    views = {i for i in received if infos[i].output_type not in _ITSELF}
    own = sorted(i for i in leaving if i not in views)
    reads = {j: tuple(i for i in own if raw[i] in read_by[j]) for j in own}
    rank: dict[int, int] = {}
    for j in sorted(own, key=lambda j: len(reads[j])):  # what another reads, reads less
        rank[j] = max((rank[i] + 1 for i in reads[j]), default=0)
    found = []
    for number in range(1, max(rank.values(), default=0) + 1):
        outputs = tuple(j for j in own if rank[j] == number)
        found.append(Level(outputs, tuple(sorted({i for j in outputs for i in reads[j]}))))
    watched = tuple(sorted(i for i in views if any(raw[i] in read for read in read_by.values())))
    return Levels(tuple(found), watched)
