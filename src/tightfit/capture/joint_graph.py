"""The traced step as a value: its graph, and what its inputs and outputs mean."""

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

__all__ = ["JointGraph", "Source"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Source:
    """Where the tensor of a placeholder comes from.

    Parameters
    ----------
    kind : str
        ``"parameter"``, ``"buffer"``, ``"input"``, ``"base"`` (what an input is a view of) or
        ``"tangent"``.
    name : str
        Qualified name of a parameter or buffer; ``"input 3"`` or ``"tangent 0"`` otherwise.
    index : int
        Position among the flattened inputs, or (tangents) among the raw outputs; -1 otherwise.
    """

    kind: str
    name: str
    index: int = -1


@dataclass(frozen=True)
class JointGraph:
    """A traced step.

    Parameters
    ----------
    module : torch.fx.GraphModule
        Placeholders (in the order of `sources`), operators, one output node.
    placeholders : tuple of node
        The input nodes.
    sources : tuple of Source
        One for each placeholder.
    write_backs : tuple of (node, int)
        New content and the placeholder position of each mutated buffer or input.
    raw_outputs : tuple of node or constant
        Tensor outputs, bases that several outputs view, and what inputs become that are changed
        other than by the program alone.
    metadata : RuntimeMetadata
        How outputs and changed inputs follow from the raw ones. An output that is known to receive
        no gradient is as in eager; should it receive one after all, the call is planned anew.
    gradients : tuple of (node, int)
        Gradient and the placeholder position of what it is the gradient of.
    structure : Structure
        The call's output without its tensors.
    origins : Origins
        Where its operators come from: modules, and regions of autocast.
    decisions : Decisions
        The values the step read in Python: the trace holds as long as they are the same.
    opaque : OpaqueModules
        The modules that run as one op.
    detached : frozenset of int
        Outputs that receive no gradient: those that the call names, and those beside its loss.
    checkpoints : Checkpoints
        Those of `torch.utils.checkpoint` that its forward goes through.
    stepped : tuple of (node, int)
        Gradients that leave it by a step of the optimizer, as `gradients` do by a hand-over.
    """

    module: fx.GraphModule
    placeholders: tuple[fx.Node, ...]
    sources: tuple[Source, ...]
    write_backs: tuple[tuple[fx.Node, int], ...]
    raw_outputs: tuple[Any, ...]
    metadata: RuntimeMetadata
    gradients: tuple[tuple[fx.Node, int], ...]
    structure: Structure
    origins: Origins
    decisions: Decisions
    opaque: OpaqueModules
    detached: frozenset[int]
    checkpoints: Checkpoints
    stepped: tuple[tuple[fx.Node, int], ...] = ()

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

    def made_from_gradients(self, outputs: Set[int]) -> set[fx.Node]:
        """Return the gradients of some outputs, and all that is computed from any of them.

        Parameters
        ----------
        outputs : set of int
            Positions among the raw outputs.
        """
        made = {
            node
            for node, source in zip(self.placeholders, self.sources, strict=True)
            if source.kind == "tangent" and source.index in outputs
        }
        for node in self.module.graph.nodes:
            if not made.isdisjoint(node.all_input_nodes):
                made.add(node)
        return made
