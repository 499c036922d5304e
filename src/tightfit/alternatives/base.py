"""What a contributor of operator alternatives sees and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import base_of, is_getitem
from tightfit.graph.ir import Alternative, Op, ValueId

__all__ = ["Extension", "OpView"]


@dataclass(frozen=True)
class Extension:
    """Further alternatives of one op.

    Parameters
    ----------
    alternatives, calls : tuple
        One call for each alternative.
    default_use : str
        How the default may be used from now on.
    unpins : bool
        Whether the op may be recomputed now although its default may not.
    optional : tuple of node
        Operators that only the default reads: computed only if it is used.
    """

    alternatives: tuple[Alternative, ...]
    calls: tuple[Call, ...]
    default_use: Literal["any", "first"] = "any"
    unpins: bool = False
    optional: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class OpView:
    """One op of a captured step, as a contributor sees it."""

    captured: Captured
    op: Op

    @property
    def node(self) -> fx.Node:
        """The traced operator."""
        return self.captured.nodes[self.op.id]

    @property
    def call(self) -> Call:
        """How the default alternative is run."""
        return self.captured.calls[self.op.id][0]

    @property
    def runs_on_cpu(self) -> bool:
        """Whether the op runs CPU kernels: only of those is it shown which give the same bits."""
        return self.captured.graph.device.kind == "cpu"

    def output_node(self, index: int) -> fx.Node | None:
        """Return the node that picks output `index`, if somebody reads it."""
        for user in self.node.users:
            if is_getitem(user) and user.args[1] == index:
                return user
        return None

    def values_of(self, *arguments: Any) -> tuple[ValueId, ...]:
        """Return the values the nodes among the arguments belong to, without repetition."""
        nodes = [a for a in arguments if isinstance(a, fx.Node)]
        known = self.captured.value_of
        return tuple(dict.fromkeys(known[base_of(n)] for n in nodes if base_of(n) in known))
