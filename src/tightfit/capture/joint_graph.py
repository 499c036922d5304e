"""The traced step as a value: its graph, and the meaning of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tightfit.capture.calls.structure import Structure
from tightfit.capture.decisions.reads import Decisions
from tightfit.capture.opaque.call import OpaqueModules
from tightfit.capture.operators.checkpoints import Checkpoints
from tightfit.capture.origins import Origins
from tightfit.torch_private.wrappers import RuntimeMetadata

aten = torch.ops.aten


@dataclass(frozen=True)
class Source:
    """Where the tensor of a placeholder comes from."""

    # ``"parameter"``, ``"buffer"``, ``"input"``, ``"base"`` (an input is a view of it) or
    # ``"tangent"``
    kind: str
    name: str  # qualified name of a parameter or buffer; ``"input 3"`` or ``"tangent 0"``
    # Position among the flattened inputs, or (tangents) among the raw outputs; -1 for others
    index: int = -1
    # Whether autograd has made an input: its gradient goes on to the node that did
    has_history: bool = False


@dataclass(frozen=True)
class JointGraph:
    """A traced step."""

    module: fx.GraphModule  # placeholders (in the order of `sources`), operators, one output node
    placeholders: tuple[fx.Node, ...]  # the input nodes
    sources: tuple[Source, ...]  # one for each placeholder
    # New content and the placeholder position of each mutated buffer or input
    write_backs: tuple[tuple[fx.Node, int], ...]
    # Tensor outputs, bases that several outputs view, and new values of inputs that are changed
    # other than by the program alone
    raw_outputs: tuple[Any, ...]
    # How outputs and changed inputs follow from the raw ones. An output that is known to receive no
    # gradient is as in eager; should it receive one after all, the call is planned again.
    metadata: RuntimeMetadata
    # Gradient and the position of its placeholder
    gradients: tuple[tuple[fx.Node, int], ...]
    structure: Structure  # the call's output without its tensors
    origins: Origins  # where its operators come from: modules, and regions of autocast
    # The values the step read in Python: the trace holds as long as they are the same
    decisions: Decisions
    opaque: OpaqueModules  # the modules that run as one op
    # Outputs that receive no gradient: outputs that the call names, and outputs returned along
    # with its loss
    detached: frozenset[int]
    checkpoints: Checkpoints  # of `torch.utils.checkpoint`, which its forward goes through
    # Gradients that a step of the optimizer takes inside, as `gradients` without a hand-over
    stepped: tuple[tuple[fx.Node, int], ...] = ()
    # Whether gradients of outputs come with other strides than were traced, those of the outputs
    other_strides: bool = False

    @property
    def takes_numbers(self) -> bool:
        """Whether numbers that the step reads from tensors are inputs of it."""
        return any(
            node.target is aten._local_scalar_dense.default for node in self.module.graph.nodes
        )

    @property
    def device(self) -> torch.device:
        """The device of the step.

        Every node of its chain in autograd's graph carries a tensor of that device: autograd then
        runs them all in that device's thread and on its stream, in order.
        """
        tensors = (node.meta.get("val") for node in self.placeholders)
        devices = (x.device for x in tensors if isinstance(x, torch.Tensor))
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    @property
    def tangents(self) -> list[tuple[fx.Node, int]]:
        """The placeholders of gradients of outputs, each with the position of its raw output."""
        pairs = zip(self.placeholders, self.sources, strict=True)
        return [(node, source.index) for node, source in pairs if source.kind == "tangent"]

    @property
    def unread(self) -> frozenset[int]:
        """The positions of placeholders that nothing reads: members of modules of other graphs."""
        return frozenset(i for i, node in enumerate(self.placeholders) if not node.users)

    @property
    def backward(self) -> set[fx.Node]:
        """The gradients of outputs, and all that is computed from any of them."""
        return self.made_from_gradients({index for _, index in self.tangents})

    def made_from_gradients(self, outputs: Set[int]) -> set[fx.Node]:
        """Return the gradients of some outputs, and all that is computed from any of them.

        `outputs`: positions among the raw outputs.
        """
        made = {node for node, index in self.tangents if index in outputs}
        for node in self.module.graph.nodes:
            if not made.isdisjoint(node.all_input_nodes):
                made.add(node)
        return made
