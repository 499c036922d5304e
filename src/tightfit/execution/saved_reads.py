"""The saved tensors that backwards of a call read: one may follow another if they share none.

Plain PyTorch frees saved tensors on the way of a backward. From another output a backward may still
come, if it reads no freed tensor: two networks in one module, say, each with a loss of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import fx

from tightfit.capture.joint_graph import JointGraph
from tightfit.execution.chain import gradient_edges
from tightfit.torch_private import engine


class SavedReads:
    """Finds out which backwards of a captured step read the same saved tensors."""

    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._tangents = frozenset(index for _, index in joint.tangents)
        self._known: dict[Any, frozenset[fx.Node]] = {}
        self._unread: dict[frozenset[int], frozenset[int]] = {}

    def read_by(
        self, grad_outputs: Mapping[int, Any], node: Any, groups: Sequence[Sequence[int]]
    ) -> frozenset[fx.Node]:
        """Return the operators of a backward that read saved tensors.

        `node`: the first of the call's chain in autograd's graph. `groups`: the placeholders whose
        gradients each node of it hands over.
        """
        edges = gradient_edges(node, groups).items()
        asked = (p for p, (x, _) in edges if x is not None and engine.asks_for_gradient(x))
        key = frozenset(i for i, g in grad_outputs.items() if g is not None), frozenset(asked)
        if key not in self._known:
            every, (outputs, positions) = self._made_from_any(), key
            ends = [node for node, position in self._joint.gradients if position in positions]
            passed = self._joint.made_from_gradients(outputs) & self._leading_to(ends)
            reading = (node for node in passed if not every.issuperset(node.all_input_nodes))
            self._known[key] = frozenset(reading)
        return self._known[key]

    def may_follow(self, freed: Set[fx.Node]) -> bool:
        """Whether from any output a backward may go that comes to none of some operators."""
        made = self._joint.made_from_gradients
        return any(freed.isdisjoint(made({i})) for i in self._tangents)

    def unread(self, outputs: frozenset[int]) -> frozenset[int]:
        """Return the placeholders that gradients from some outputs do not depend on."""
        if outputs not in self._unread:
            joint = self._joint
            own = joint.made_from_gradients(outputs)
            ends = [node for node, _ in joint.gradients if node in own]
            read = self._leading_to(ends, without=self._made_from_any() - own)
            others = (i for i, node in enumerate(joint.placeholders) if node not in read)
            self._unread[outputs] = frozenset(others)
        return self._unread[outputs]

    def _made_from_any(self) -> set[fx.Node]:
        """Return all that is computed from gradients; operators read saved tensors besides."""
        return self._joint.made_from_gradients(self._tangents)

    def _leading_to(self, ends: Iterable[Any], without: Set[fx.Node] = frozenset()) -> set[fx.Node]:
        """Return some values and all that they are computed from, but for some."""
        found = {node for node in ends if isinstance(node, fx.Node)}
        for node in reversed(self._joint.module.graph.nodes):
            if node in found:
                found.update(x for x in node.all_input_nodes if x not in without)
        return found
