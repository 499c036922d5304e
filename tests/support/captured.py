"""Captured steps as what can be compared: all that they are, but for the identity of nodes."""

from __future__ import annotations

from typing import Any

import torch

from tightfit.capture.captured import Captured
from tightfit.capture.nodes import flat_outputs
from tightfit.torch_private import core as private
from tightfit.torch_private.wrappers import facts_of


def described(step: Captured) -> list[Any]:
    """Return all that a captured step is, but for the identity of its nodes."""
    storages: dict[int, int] = {}
    nodes = []
    for node in step.joint.module.graph.nodes:
        tensors = []
        for t in flat_outputs(node):
            if isinstance(t, torch.Tensor):
                storage = storages.setdefault(private.storage_key(t), len(storages))
                tensors.append(
                    (t.shape, t.stride(), t.dtype, t.requires_grad, t.is_conj(), storage)
                )
        notes = {k: v for k, v in node.meta.items() if k in ("seq_nr", "partitioner_tag")}
        args = sorted(map(str, node.all_input_nodes)) if node.op == "output" else str(node.args)
        nodes.append((node.op, node.name, str(node.target), args, tensors, notes))
    joint = step.joint
    ends = (joint.write_backs, joint.raw_outputs, joint.gradients)
    facts = (joint.sources, facts_of(joint.metadata), joint.origins, joint.decisions)
    return [step.graph, *nodes, str(ends), *facts, joint.detached, joint.structure]
